/** The frame around every view: where one is, whose key it is, the time zone and the theme. */
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { changed, link } from "../lib/route.js";
import { chosenTheme, nextTheme } from "../lib/theme.js";
import { zoneName } from "../lib/time.js";

export function Shell({ route, me, onLeave, children }) {
  const main = useRef(null);
  const place = `${route.job}/${route.stage}`;
  const first = useRef(place);
  useEffect(() => {
    document.title = [route.stage, route.job, "tidegauge"].filter(Boolean).join(" · ");
    // Whoever listens to the page is told of the new view; not when it is opened.
    if (first.current !== place) main.current?.focus();
    first.current = "";
  }, [place]);
  const skip = (event) => {
    event.preventDefault();
    main.current?.focus();
  };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <nav aria-label="Where you are"><ol class="crumbs">
        <li><a href=${link()} class="brand">tidegauge</a></li>
        ${route.job && html`<li><a href=${link({ job: route.job })}>${route.job}</a></li>`}
        ${route.stage && html`<li><a href=${link(route)} aria-current="page">${route.stage}</a></li>`}
      </ol></nav>
      <div class="tools">
        <${ZoneSwitch} route=${route} />
        <${ThemeSwitch} />
        ${me.name !== null && html`<span class="who">${me.name} <small>(${me.role})</small></span>
          <button type="button" class="quiet" onClick=${onLeave}>Log out</button>`}
      </div>
    </header>
    <main id="main" tabindex="-1" ref=${main}>${children}</main>
    <footer><a href="docs">The HTTP API</a></footer>`;
}

function ZoneSwitch({ route }) {
  const zone = route.query.get("tz") === "local" ? "local" : "utc";
  const other = zone === "utc" ? "local" : "utc";
  const to = changed(route, { tz: other === "local" ? "local" : null });
  return html`<a class="quiet button" href=${to} title=${`Show times in ${zoneName(other)}`}>
    <span class="hidden">Times are in </span>${zoneName(zone)}</a>`;
}

function ThemeSwitch() {
  const [theme, setTheme] = useState(chosenTheme());
  return html`<button type="button" class="quiet" title="Light, dark, or as your machine has it"
    onClick=${() => setTheme(nextTheme())}>Theme: ${theme}</button>`;
}
