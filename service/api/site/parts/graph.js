/** A job's graph. Each stage is a link; what holds everything back is in one colour, down to the range. */
import { html, useLayoutEffect, useMemo, useRef } from "../lib/html.js";
import { now } from "../lib/api.js";
import { NODE, curve, layout } from "../lib/layout.js";
import { changed, go, link } from "../lib/route.js";
import { duration, instant, isEnd, isInstant, lag } from "../lib/time.js";
import { Following, Unchanged } from "./following.js";
import { kindOf, signOf, wordOf } from "./status.js";

const MARGIN = 12;
const ZOOMS = [0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1, 1.25];
/** Smaller, nobody could read it: then it is scrolled. */
const LEAST_ZOOM = 0.7;
const NAME_LENGTH = 24;

/** The reasons of the API, as words under a stage. */
export const REASONS = {
  never_reported: "has never reported",
  ended: "is as the last run has left it",
  lease_expired: "nobody has a lease on it",
  waiting_for_commit: "waits for a commit",
  throttled: "is asked to pause",
  stalled: "reports, but its oldest work ages",
  buffering: "keeps a hold",
  no_input: "has not seen the newest input",
  idle: "is idle",
  behind: "is the lowest",
};

/** @param {{store: import("../lib/job-store.js").JobStore, why: any, route: any, zone: any, nowMs: number}} props */
export function Graph({ store, why, route, zone, nowMs }) {
  const path = why ? why.path.map((step) => step.stage).join(" ") : "";
  const held = why?.holders.length ? { range: why.holders[0].range, more: why.holders_total - 1 } : null;
  // Only what it depends on, and each of it a plain value: an explanation is another one each time.
  return html`<${Drawing} store=${store} graph=${store.graph} path=${path} range=${held?.range ?? null} more=${held?.more ?? 0}
    route=${route} zone=${zone} nowMs=${nowMs} />`;
}

class Drawing extends Unchanged {
  render(props) {
    return html`<${Stages} ...${props} />`;
  }
}

function Stages({ store, graph, path: joined, range, more, route, zone, nowMs }) {
  const drawn = useMemo(() => layout(graph), [graph]);
  const box = useRef(null);
  const zoom = Number(route.query.get("zoom")) || 0;
  const width = drawn.width + 2 * MARGIN;
  const height = drawn.height + 2 * MARGIN + 28;
  useLayoutEffect(() => fit(box.current, width, height, zoom), [width, height, zoom]);
  const path = joined ? joined.split(" ") : [];
  const held = new Set(path);
  const to = (step) => () => go(changed(route, { zoom: stepped(box.current, width, step) }), { replace: true });
  return html`<section class="graph" aria-labelledby="graph-title">
    <div class="heading"><h2 id="graph-title">Graph</h2><div class="tools">
      <button type="button" onClick=${to(-1)} aria-label="Smaller">−</button>
      <button type="button" onClick=${to(1)} aria-label="Larger">+</button>
      <a class="button" href=${changed(route, { zoom: null })}>Fit</a></div></div>
    <div class="canvas" ref=${box} tabindex="0" role="group" aria-label="The graph: sources left, sinks right">
      <svg viewBox=${`${-MARGIN} ${-MARGIN} ${width} ${height}`}>
        ${drawn.edges.map((edge) => html`<${EdgeLine} key=${`${edge.from}→${edge.to}`} edge=${edge}
          store=${store} held=${isStep(path, edge)} />`)}
        ${[...drawn.places].map(([name, place]) => html`<${StageBox} key=${name} name=${name} place=${place}
          store=${store} node=${graph.get(name)} held=${held.has(name)} more=${more}
          range=${name === path.at(-1) ? range : null} zone=${zone} nowMs=${nowMs} />`)}
      </svg>
    </div>
    <p class="legend"><span class="key held"></span> holds back what is explained below
      <span class="key waits"></span> has brought more than the stage can use: it waits for another input</p>
  </section>`;
}

function fit(box, width, height, zoom) {
  const scale = zoom || Math.max(Math.min(1, (box.clientWidth - 2) / width), LEAST_ZOOM);
  const svg = box.firstElementChild;
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
}

function stepped(box, width, step) {
  const scale = Number(box.firstElementChild.getAttribute("width")) / width;
  const rest = step > 0 ? ZOOMS.filter((each) => each > scale + 0.01) : ZOOMS.filter((each) => each < scale - 0.01);
  return (step > 0 ? rest[0] : rest[rest.length - 1]) ?? scale.toFixed(2);
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

class StageBox extends Following {
  render({ name, place, store, node, held, range, more, zone }) {
    const stage = store.stages.get(name);
    const kind = kindOf(stage);
    const lines = [instant(stage?.output_watermark ?? null, zone), lags(stage, now()), reported(stage, node)];
    return html`<a href=${link({ job: store.job, stage: name })} class=${`stage ${kind}${held ? " held" : ""}`} data-stage=${name}
      aria-label=${`${name}, ${wordOf(kind)}: ${lines.join(", ")}${held ? ", on the path that holds back" : ""}`}>
      <title>${name}</title>
      <g transform=${`translate(${place.x} ${place.y})`}>
        <rect class="box" width=${NODE.width} height=${NODE.height} rx="6" />
        <text class="name" x="12" y="22">${shortened(name)}</text>
        <text class="sign" x=${NODE.width - 12} y="22">${signOf(kind)}</text>
        <text class="output" x="12" y="44">${lines[0]}</text>
        <text x="12" y="63">${lines[1]}</text>
        <text x="12" y="81">${lines[2]}</text>
        ${range !== null && html`<g class="holder" data-range=${range}>
          <rect x="8" y=${NODE.height} width=${NODE.width - 16} height="24" rx="4" />
          <text x="16" y=${NODE.height + 16}>${shortened(range)}${more > 0 ? ` +${more.toLocaleString("en")}` : ""}</text></g>`}
      </g></a>`;
  }
}

function lags(stage, nowMs) {
  if (!stage || stage.output_watermark === null) return "no lag yet";
  if (isEnd(stage.output_watermark)) return "nothing more will come";
  const system = stage.processing_watermark;
  const behind = `lag ${duration(lag(stage.output_watermark, nowMs))}`;
  return isInstant(system) ? `${behind} · system ${duration(Math.max(0, nowMs - system))}` : behind;
}

function reported(stage, node) {
  if (node?.kind === "passthrough") return "no ranges of its own";
  const total = (stage?.ranges.total ?? node?.ranges ?? 0).toLocaleString("en");
  const done = (stage?.ranges.reported ?? 0).toLocaleString("en");
  const retired = stage?.ranges.retired;
  return retired ? `${done} of ${total} reported, ${retired.toLocaleString("en")} retired` : `${done} of ${total} ranges reported`;
}

const shortened = (name) => (name.length > NAME_LENGTH ? `${name.slice(0, NAME_LENGTH - 1)}…` : name);
