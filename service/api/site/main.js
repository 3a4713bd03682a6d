/** The page: who looks, what is looked at, and the frame around it. */
import { Problem, key, whenRefused, whoAmI } from "./lib/api.js";
import { html, render, useEffect, useLayoutEffect, useState } from "./lib/html.js";
import { current, link } from "./lib/route.js";
import { Boundary } from "./parts/boundary.js";
import { Login } from "./parts/login.js";
import { Shell } from "./parts/shell.js";
import { JobView } from "./views/job.js";
import { JobsView } from "./views/jobs.js";
import { StageView } from "./views/stage.js";

const RETRY_MS = 1_000;

function App() {
  const route = useRoute();
  const [me, setMe] = useState(/** @type {import("./lib/api.js").Me | null} */ (null));
  const [problem, setProblem] = useState(/** @type {Problem | null} */ (null));
  const [asked, ask] = useState(0);

  useEffect(() => {
    whenRefused((refused) => {
      setMe(null);
      setProblem(refused);
    });
  }, []);
  useEffect(() => {
    let timer = 0;
    whoAmI().then(
      (found) => (setMe(found), setProblem(null)),
      (failed) => {
        setProblem(failed);
        if (failed.passing) timer = setTimeout(() => ask(asked + 1), RETRY_MS);
      },
    );
    return () => clearTimeout(timer);
  }, [asked]);

  const leave = () => {
    key.clear();
    setMe(null);
    ask(asked + 1);
  };
  if (me) return html`<${Shell} route=${route} me=${me} onLeave=${leave}>
      <${Boundary} key=${placeOf(route)}><${View} route=${route} me=${me} /></${Boundary}></${Shell}>`;
  if (problem && !problem.passing) {
    const enter = (found) => (setMe(found), setProblem(null));
    return html`<${Login} refused=${key.get() ? problem : null} onEnter=${enter} />`;
  }
  return html`<p class="waiting" role="status">${problem ? `${problem.message} Trying again.` : "Loading"}</p>`;
}

function View({ route, me }) {
  const zone = route.query.get("tz") === "local" ? "local" : "utc";
  const given = { route, me, zone, key: placeOf(route) };
  if (route.view === "jobs") return html`<${JobsView} ...${given} />`;
  if (route.view === "job") return html`<${JobView} ...${given} />`;
  if (route.view === "stage") return html`<${StageView} ...${given} />`;
  return html`<h1>There is no such view</h1><p><a href=${link()}>All jobs</a></p>`;
}

const placeOf = (route) => `${route.view}/${route.job}/${route.stage}`;

function useRoute() {
  const [route, setRoute] = useState(current());
  // At once: a link that is followed before the first paint would be lost.
  useLayoutEffect(() => {
    const follow = () => setRoute(current());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

// A laptop that slept, or a clock that was set: look at the service's clock again.
setInterval(() => {
  if (!document.hidden) whoAmI().catch(() => {});
}, 600_000);

render(html`<${App} />`, document.getElementById("app"));
