/** The stages of a job as a table: what the graph shows, in lines. */
import { now } from "../lib/api.js";
import { html } from "../lib/html.js";
import { changed, go, link } from "../lib/route.js";
import { instant, lagText } from "../lib/time.js";
import { Following, Unchanged } from "./following.js";
import { badgesOf } from "./stage-box.js";
import { NO_RANGES, Status, systemLag } from "./status.js";

/** With more stages than this, there is a field to find one. */
const MANY = 12;
/** And so many are shown at first. */
const PAGE = 100;

/** @param {{store: import("../lib/job-store.js").JobStore, why: any, route: any, zone: any, nowMs: number}} props */
export function StageTable({ store, why, route, zone, nowMs }) {
  const held = why?.path.map((step) => step.stage).join(" ") ?? "";
  return html`<${Lines} store=${store} graph=${store.graph} held=${held} route=${route} zone=${zone} nowMs=${nowMs} />`;
}

class Lines extends Unchanged {
  render(props) {
    return html`<${Table} ...${props} />`;
  }
}

function Table({ store, graph, held: joined, route, zone, nowMs }) {
  const wanted = (route.query.get("q") ?? "").toLowerCase();
  const limit = Number(route.query.get("n")) || PAGE;
  const names = [...graph.keys()].filter((name) => name.toLowerCase().includes(wanted));
  const held = new Set(joined.split(" "));
  const find = (event) => go(changed(route, { q: event.target.value }), { replace: true });
  return html`<section aria-labelledby="stages-title">
    <div class="heading"><h2 id="stages-title">Stages</h2>
      ${graph.size > MANY && html`<form role="search" onSubmit=${(event) => event.preventDefault()}>
        <label class="hidden" for="find">Find a stage</label>
        <input id="find" type="search" placeholder="Find a stage" value=${wanted} onInput=${find} /></form>`}
    </div>
    <div class="scroll"><table class="cards">
      <caption class="hidden">Stages, each after its inputs</caption>
      <thead><tr><th scope="col">Stage</th><th scope="col">State</th><th scope="col">Output watermark</th>
        <th scope="col">Data lag</th><th scope="col">System lag</th><th scope="col">Ranges reported</th>
        <th scope="col">Late rows</th><th scope="col"><span class="hidden">Explanation</span></th></tr></thead>
      <tbody>${names.slice(0, limit).map((name) => html`<${Row} key=${name} name=${name} store=${store} route=${route}
        held=${held.has(name)} zone=${zone} nowMs=${nowMs} />`)}</tbody>
    </table></div>
    ${names.length > limit && html`<p><a class="button" href=${changed(route, { n: limit * 5 })}>Show more</a>
      <span class="help"> ${limit} of ${names.length.toLocaleString("en")} stages</span></p>`}</section>`;
}

class Row extends Following {
  render({ name, store, held, zone, route }) {
    const [stage, job, nowMs] = [store.stages.get(name), store.job, now()];
    const { total = 0, reported = 0 } = stage?.ranges ?? {};
    const output = stage?.output_watermark ?? null;
    return html`<tr class=${held ? "held" : ""}>
      <th scope="row"><a href=${link({ job, stage: name })}>${name}</a></th>
      <td data-label="State"><span><${Status} of=${stage} />${badgesOf(stage, store.throttle?.shards[name]).map((text) =>
        html`<span class=${`chip ${text.split(" ")[0]}`}>${text}</span>`)}</span></td>
      <td data-label="Output watermark" class="time">${instant(output, zone)}</td>
      <td data-label="Data lag">${lagText(output, nowMs)}</td>
      <td data-label="System lag">${systemLag(stage, nowMs) ?? "–"}</td>
      <td data-label="Ranges reported">${total ? `${reported.toLocaleString("en")} of ${total.toLocaleString("en")}` : stage ? NO_RANGES : "–"}</td>
      <td data-label="Late rows">${(stage?.late ?? 0).toLocaleString("en")}</td>
      <td><a href=${changed(route, { why: name })} aria-label=${`Why is ${name} where it is?`}>why?</a></td>
    </tr>`;
  }
}
