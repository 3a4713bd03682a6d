/**
 * A stage's ranges as a map: one cell for each, or for so many neighbours that a few hundred cells are left.
 *
 * The service counts them, so a cell hides none of its ranges: it shows its slowest, and how many of them
 * have no worker, never reported, are idle or retired.
 */
import { html, useRef } from "../lib/html.js";
import { strongest, heatOf, isAlarm, isWaitedFor, scaleOf } from "../lib/heat.js";
import { changed, go } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { counted, duration, instant, isEnd } from "../lib/time.js";

/** @param {{summary: any, route: any, zone: import("../lib/time.js").Zone, health: string | null | undefined, ended: boolean}} props */
export function HeatMap({ summary, route, zone, health, ended }) {
  const { buckets, total } = summary;
  const grid = useRef(null);
  const current = useRef(0);
  if (!buckets.length) return null;
  const scale = scaleOf(buckets);
  const width = Math.max(...buckets.map((each) => each.ranges));
  const shown = buckets.reduce((sum, each) => sum + each.ranges, 0);
  const open = (bucket) => {
    if (bucket.ranges > 1) go(changed(route, { rf: bucket.index, rt: bucket.index + bucket.ranges, n: null }));
  };
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: rowLength(grid.current), ArrowUp: -rowLength(grid.current) }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(buckets.length - 1, current.current + step));
    grid.current.children[at].focus();
  };
  const focus = (k) => () => {
    grid.current.children[current.current]?.setAttribute("tabindex", "-1");
    current.current = k;
    grid.current.children[k].setAttribute("tabindex", "0");
  };
  return html`<div class=${isAlarm(health) ? "heat-box alarm" : "heat-box"}>
    <p class="legend">${caption(shown, total, buckets.length, width)}
      ${shown < total && html` <a class="button" href=${changed(route, { rf: null, rt: null })}>All ranges</a>`}</p>
    <div class="heat" ref=${grid} role="group" aria-label=${caption(shown, total, buckets.length, width)} onKeyDown=${move}>
      ${buckets.map((bucket, k) => html`<button type="button" key=${bucket.index} class=${heatOf(bucket, scale, ended)}
        tabindex=${k === Math.min(current.current, buckets.length - 1) ? 0 : -1} aria-label=${label(bucket, zone, ended)}
        title=${label(bucket, zone, ended)} onFocus=${focus(k)} onClick=${() => open(bucket)}>${sign(bucket, ended)}</button>`)}
    </div>
    <p class="legend" aria-hidden="true">
      <span class="entry"><span class="key level0"></span> up to ${unbroken(duration(scale.usual))} behind the furthest
        <span class="key level2"></span> <span class="key level4"></span> ${unbroken(duration(strongest(scale)))} or more</span>${" "}
      <span class="entry"><span class="key never"></span> ? never reported</span>${" "}
      <span class="entry">${ended ? html`<span class="key"></span> □ ended` : html`<span class="key expired"></span> ! no worker`}</span>${" "}
      <span class="entry"><span class="key idle"></span> z idle</span>${" "}
      <span class="entry"><span class="key final"></span> ■ final</span>${" "}
      <span class="entry"><span class="key final"></span> × retired</span></p>
  </div>`;
}

function caption(shown, total, cells, width) {
  const what = shown < total ? `${shown.toLocaleString("en")} of ${counted(total, "range")}` : counted(total, "range");
  return width === 1 ? `${what}, a cell for each` : `${what} in ${cells} cells of up to ${width.toLocaleString("en")}: each has the colour of its slowest range`;
}

function sign(bucket, ended) {
  if (bucket.never_reported) return "?";
  if (bucket.expired) return ended ? "□" : "!";
  if (bucket.idle) return "z";
  if (bucket.retired && isEnd(bucket.lowest)) return "×";
  return isEnd(bucket.lowest) ? "■" : "";
}

function label(bucket, zone, ended) {
  const name = bucket.ranges === 1 ? bucket.first
    : `${counted(bucket.ranges, "range")} from ${bucket.first}`;
  const parts = [];
  if (bucket.never_reported) parts.push(`${bucket.never_reported.toLocaleString("en")} never reported`);
  else if (isWaitedFor(bucket)) parts.push(`${bucket.ranges === 1 ? "at" : "slowest at"} ${instant(bucket.lowest, zone)}`);
  for (const each of ["expired", "idle", "final", "retired"]) {
    const word = each !== "expired" ? each : ended ? "ended" : "without a worker";
    if (bucket[each]) parts.push(`${bucket[each].toLocaleString("en")} ${word}`);
  }
  return `${name}: ${parts.join(", ")}`;
}

/** How many cells stand in a row. */
function rowLength(grid) {
  const top = grid.firstElementChild.offsetTop;
  const next = [...grid.children].findIndex((cell) => cell.offsetTop > top);
  return next < 0 ? grid.children.length : next;
}
