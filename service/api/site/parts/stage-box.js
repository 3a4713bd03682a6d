/** A stage in the graph: its name, watermark, lags and ranges, with badges for all that is not well. */
import { html } from "../lib/html.js";
import { now } from "../lib/api.js";
import { NODE } from "../lib/layout.js";
import { link } from "../lib/route.js";
import { firstFitted, fitted, widthOf } from "../lib/text.js";
import { coarse, instant, isEnd, lagText } from "../lib/time.js";
import { Following } from "./following.js";
import { endedOf, isUnwell, kindOf, NO_RANGES, signOf, systemLag, wordOf } from "./status.js";

const PAD = 10;
const GAP = 6;
const BADGE = { height: 18, pad: 5 };
/** As in the style sheet: what is measured is what is drawn. */
const FONTS = { name: "700 13px", text: "400 12px", badge: "600 12px" };
/** A holder's name gets at least this much. */
const LEAST_HOLDER = 60;

/** @param {{name: string, place: {x: number, y: number}, store: any, node: any, held: boolean, range: string | null, more: number, numbers: string, zone: any}} props */
export class StageBox extends Following {
  render({ name, place, store, node, held, range, more, numbers, zone }) {
    const stage = store.stages.get(name);
    const kind = kindOf(stage);
    const lagLines = lags(stage, now());
    const lines = [instant(stage?.output_watermark ?? null, zone), lagLines[0], reported(stage, node)];
    // Beside the watermark, `input ended` would take the room of its last digits.
    const badges = [endedOf(stage), ...badgesOf(stage, store.throttle?.shards[name])].filter(Boolean);
    const foot = range !== null || badges.length > 0;
    const described = [wordOf(kind), ...badges].join(", ");
    const health = isUnwell(kind) ? wordOf(kind) : "";
    const healthWidth = health ? badgeWidth(health) : 0;
    const numberWidth = numbers ? badgeWidth(numbers) + GAP : 0;
    const room = NODE.width - 2 * PAD;
    return html`<a href=${link({ job: store.job, stage: name })} class=${`stage ${kind}${held ? " held" : ""}`} data-stage=${name}
      draggable=${false} aria-label=${`${problemsText(numbers)}${name}, ${described}: ${lines.join(", ")}${held ? ", on the path that holds back" : ""}`}>
      <title>${name}</title>
      <g transform=${`translate(${place.x} ${place.y})`}>
        <rect class="box" width=${NODE.width} height=${NODE.height + (foot ? NODE.foot : 0)} rx="6" />
        ${numbers && html`<${Badge} kind="number" x=${PAD} y=${4} text=${numbers} />`}
        <text class="name" x=${PAD + numberWidth} y="17">${fitted(name, FONTS.name, room - numberWidth - 20)}</text>
        <text class="sign" x=${NODE.width - PAD} y="17">${signOf(kind)}</text>
        <text class="output" x=${PAD} y="36">${fitted(lines[0], FONTS.text, room - (health ? healthWidth + GAP : 0))}</text>
        ${health && html`<${Badge} kind="health" x=${NODE.width - PAD - healthWidth} y=${23} text=${health} />`}
        <text x=${PAD} y="55">${firstFitted(lagLines, FONTS.text, room)}</text>
        <text x=${PAD} y="71">${fitted(lines[2], FONTS.text, room)}</text>
        ${foot && html`<${Foot} range=${range} more=${more} badges=${badges} />`}
      </g></a>`;
  }
}

const problemsText = (numbers) => (numbers ? `problem${numbers.includes(",") ? "s" : ""} ${numbers}, ` : "");

const badgeWidth = (text) => Math.ceil(widthOf(text, FONTS.badge)) + 2 * BADGE.pad;

function Badge({ kind, x, y, text, width = badgeWidth(text) }) {
  return html`<g class=${`badge ${kind}`}><rect x=${x} y=${y} width=${width} height=${BADGE.height} rx="4" />
    <text x=${x + BADGE.pad} y=${y + 13}>${text}</text></g>`;
}

/** The range that holds back, and the badges: these have their whole words, the range what is left. */
function Foot({ range, more, badges }) {
  const y = NODE.height;
  const begin = badges.reduce((x, text) => x - badgeWidth(text) - GAP, NODE.width - PAD + GAP);
  let next = begin;
  const placed = badges.map((text) => {
    const x = next;
    next += badgeWidth(text) + GAP;
    return html`<${Badge} kind=${text.split(" ")[0]} x=${x} y=${y} text=${text} />`;
  });
  if (range === null) return placed;
  const others = more > 0 ? ` +${more.toLocaleString("en")}` : "";
  const room = Math.max(LEAST_HOLDER, begin - GAP - PAD) - 2 * BADGE.pad;
  const text = fitted(range, FONTS.badge, room - (others ? widthOf(others, FONTS.badge) : 0)) + others;
  return html`${placed}<g class="holder" data-range=${range}><title>${range}${others}</title>
    <${Badge} kind="range" x=${PAD} y=${y} text=${text} /></g>`;
}

/** The late, retired and throttled ranges of a stage: none is a health. */
export function badgesOf(stage, shards) {
  const counts = [
    ["late ranges", stage?.late_ranges ?? 0], ["retired", stage?.ranges.retired ?? 0], ["throttled", Object.keys(shards ?? {}).length],
  ];
  return counts.filter(([, count]) => count > 0).map(([word, count]) => `${word} ${count.toLocaleString("en")}`);
}

/** Both lags, then with a unit less each time: a shorter one is used where the whole one has no room. */
function lags(stage, nowMs) {
  if (!stage || stage.output_watermark === null) return ["no lag yet"];
  if (isEnd(stage.output_watermark)) return ["nothing more will come"];
  const [data, system] = [lagText(stage.output_watermark, nowMs), systemLag(stage, nowMs)];
  if (system === null) return [`lag ${data}`];
  return [[data, system], [data, coarse(system)], [coarse(data), coarse(system)]].map(([a, b]) => `lag ${a} · system ${b}`);
}

function reported(stage, node) {
  if (node?.kind === "passthrough") return `ranges: ${NO_RANGES}`;
  const total = stage?.ranges.total ?? node?.ranges ?? 0;
  const done = stage?.ranges.reported ?? 0;
  if (total === 1) return `its only range has ${done ? "reported" : "not reported"}`;
  return `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ranges reported`;
}
