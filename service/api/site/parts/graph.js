/** A job's graph. Each stage is a link; what holds everything back is in one colour, down to the range. */
import { html, useMemo } from "../lib/html.js";
import { curve, layout } from "../lib/layout.js";
import { isEnd } from "../lib/time.js";
import { Following, Unchanged } from "./following.js";
import { Pan } from "./pan.js";
import { StageBox } from "./stage-box.js";

/** @param {{store: import("../lib/job-store.js").JobStore, why: any, problems: any[], route: any, zone: any, nowMs: number}} props */
export function Graph({ store, why, problems, route, zone, nowMs }) {
  const path = why ? why.path.map((step) => step.stage).join(" ") : "";
  const held = why?.holders.length ? { range: why.holders[0].range, more: why.holders_total - 1 } : null;
  // Only what it depends on, and each of it a plain value: an explanation is another one each time.
  return html`<${Drawing} store=${store} graph=${store.graph} path=${path} range=${held?.range ?? null} more=${held?.more ?? 0}
    problems=${problems.map((each) => each.stage).join(" ")} route=${route} zone=${zone} nowMs=${nowMs} />`;
}

class Drawing extends Unchanged {
  render(props) {
    return html`<${Stages} ...${props} />`;
  }
}

function Stages({ store, graph, path: joined, range, more, problems, route, zone, nowMs }) {
  const drawn = useMemo(() => layout(graph), [graph]);
  const numbers = useMemo(() => numbered(problems), [problems]);
  const path = joined ? joined.split(" ") : [];
  const held = new Set(path);
  return html`<section class="graph" aria-labelledby="graph-title">
    <${Pan} drawn=${drawn} cause=${path.at(-1) ?? null} route=${route}>
      ${drawn.edges.map((edge) => html`<${EdgeLine} key=${`${edge.from}→${edge.to}`} edge=${edge}
        store=${store} held=${isStep(path, edge)} />`)}
      ${[...drawn.places].map(([name, place]) => html`<${StageBox} key=${name} name=${name} place=${place}
        store=${store} node=${graph.get(name)} held=${held.has(name)} more=${more} numbers=${numbers.get(name) ?? ""}
        range=${name === path.at(-1) ? range : null} zone=${zone} nowMs=${nowMs} />`)}
    </${Pan}>
    <p class="legend"><span class="key held"></span> holds back what is explained below
      <span class="key waits"></span> has brought more than the stage can use: it waits for another input</p>
  </section>`;
}

/** The numbers of each stage's problems, as in the list. */
function numbered(stages) {
  const numbers = new Map();
  if (stages) stages.split(" ").forEach((name, k) => numbers.set(name, [...(numbers.get(name) ?? []), k + 1]));
  return new Map([...numbers].map(([name, of]) => [name, of.join(", ")]));
}

/** Whether what this edge brought waits: its stage is ahead of the reader's input. */
function ahead(store, edge) {
  const from = store.stages.get(edge.from)?.output_watermark ?? null;
  const to = store.stages.get(edge.to);
  return from !== null && !isEnd(from) && !!to && (to.input_watermark === null || to.input_watermark < from);
}

/** The path goes up the graph, from the stage that was asked for. */
function isStep(path, edge) {
  const at = path.indexOf(edge.to);
  return at >= 0 && path[at + 1] === edge.from;
}

class EdgeLine extends Following {
  names() {
    return [this.props.edge.from, this.props.edge.to];
  }

  render({ edge, store, held }) {
    const kind = `${ahead(store, edge) ? " waits" : ""}${held ? " held" : ""}`;
    return html`<path class=${`edge${kind}`} d=${curve(edge.points)} data-edge=${`${edge.from}→${edge.to}`} />`;
  }
}
