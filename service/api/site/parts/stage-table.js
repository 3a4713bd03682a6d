/** The stages of a job as a table: what the graph shows, in lines. */
import { html, Component } from "../lib/html.js";
import { changed, go, link } from "../lib/route.js";
import { duration, instant, isEnd, isInstant, lag } from "../lib/time.js";
import { Status } from "./status.js";

/** With more stages than this, there is a field to find one. */
const MANY = 12;

/** @param {{store: import("../lib/job-store.js").JobStore, why: any, route: any, zone: any, nowMs: number}} props */
export function StageTable({ store, why, route, zone, nowMs }) {
  const wanted = (route.query.get("q") ?? "").toLowerCase();
  const names = [...store.graph.keys()].filter((name) => name.toLowerCase().includes(wanted));
  const held = new Set(why?.path.map((step) => step.stage));
  const find = (event) => go(changed(route, { q: event.target.value }), { replace: true });
  return html`<section aria-labelledby="stages-title">
    <div class="heading"><h2 id="stages-title">Stages</h2>
      ${store.graph.size > MANY && html`<form role="search" onSubmit=${(event) => event.preventDefault()}>
        <label class="hidden" for="find">Find a stage</label>
        <input id="find" type="search" placeholder="Find a stage" value=${wanted} onInput=${find} /></form>`}
    </div>
    <div class="scroll"><table class="cards">
      <caption class="hidden">Stages, each after its inputs</caption>
      <thead><tr><th scope="col">Stage</th><th scope="col">Status</th><th scope="col">Output watermark</th>
        <th scope="col">Data lag</th><th scope="col">System lag</th><th scope="col">Ranges reported</th>
        <th scope="col">Late rows</th><th scope="col"><span class="hidden">Explanation</span></th></tr></thead>
      <tbody>${names.map((name) => html`<${Row} key=${name} name=${name} job=${store.job} route=${route}
        stage=${store.stages.get(name)} held=${held.has(name)} zone=${zone} nowMs=${nowMs} />`)}</tbody>
    </table></div></section>`;
}

class Row extends Component {
  shouldComponentUpdate(next) {
    return ["stage", "held", "zone", "nowMs", "route"].some((name) => next[name] !== this.props[name]);
  }

  render({ name, job, stage, held, zone, nowMs, route }) {
    const { total = 0, reported = 0 } = stage?.ranges ?? {};
    const output = stage?.output_watermark ?? null;
    const system = stage?.processing_watermark;
    return html`<tr class=${held ? "held" : ""}>
      <th scope="row"><a href=${link({ job, stage: name })}>${name}</a></th>
      <td data-label="Status"><${Status} status=${stage?.status ?? "unknown"} /></td>
      <td data-label="Output watermark" class="time">${instant(output, zone)}</td>
      <td data-label="Data lag">${isEnd(output) ? "–" : duration(lag(output, nowMs))}</td>
      <td data-label="System lag">${isInstant(system) ? duration(Math.max(0, nowMs - system)) : "–"}</td>
      <td data-label="Ranges reported">${total ? `${reported.toLocaleString("en")} of ${total.toLocaleString("en")}` : "–"}</td>
      <td data-label="Late rows">${(stage?.late ?? 0).toLocaleString("en")}</td>
      <td><a href=${changed(route, { why: name })} aria-label=${`Why is ${name} where it is?`}>why?</a></td>
    </tr>`;
  }
}
