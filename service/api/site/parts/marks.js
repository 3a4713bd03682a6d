/** Marks on the chart: the runs, resets, retirements and specifications that explain a step. */
import { html } from "../lib/html.js";
import { unbroken } from "../lib/text.js";
import { counted, instant, wholeMoments } from "../lib/time.js";

/** How each is shown: never by colour alone. The most telling first: of many, these are drawn. */
const KINDS = {
  failed: ["✕", "run failed"],
  stopped: ["⊘", "run stopped"],
  reset: ["◆", "reset"],
  retired: ["◇", "range retired"],
  returned: ["◈", "range reports again"],
  specification: ["▼", "specification changed"],
  created: ["✚", "job created"],
  opened: ["▶", "run opened"],
  ended: ["□", "run ended"],
};
const NAMES = Object.keys(KINDS);

const ACTIONS = {
  "create-job": "created", "change-job": "specification", "reset-job": "reset", "delete-job": "reset",
  "retire-range": "retired", "return-range": "returned", "open-run": "opened", "end-run": "ended",
};

/** Of a run that has ended otherwise than by itself. */
const OUTCOMES = { failed: "failed", stopped: "stopped" };

/** Width of the chart for each mark: more of them would cover the lines. */
const ROOM = 24;
const NEAR = 8;

/** @typedef {{at: number, kind: string, text: string, because: string | null}} Mark */

/**
 * @param {any[]} changes of the API, newest first
 * @returns {Mark[]}
 */
export const marksOf = (changes) => changes.filter((each) => each.action in ACTIONS).map((each) => ({
  at: Date.parse(each.at),
  kind: OUTCOMES[each.outcome] ?? ACTIONS[each.action],
  text: each.detail,
  because: each.because,
}));

/**
 * As many of the marks as a chart has room for: first the telling kinds, and the newest of each.
 * @param {Mark[]} marks newest first @param {number} width
 */
export function thinned(marks, width) {
  const most = Math.max(1, Math.floor(width / ROOM));
  if (marks.length <= most) return marks;
  return marks.toSorted((a, b) => NAMES.indexOf(a.kind) - NAMES.indexOf(b.kind)).slice(0, most);
}

/**
 * Draw the marks over a plot, as elements, in the colours of the theme.
 * @returns {number} those that have no room
 */
export function place(plot, marks) {
  const { min, max } = plot.scales.x;
  const visible = marks.filter((each) => each.at >= min && each.at <= max);
  const drawn = thinned(visible, plot.over.clientWidth);
  const layer = plot.over.querySelector(".marks") ?? plot.over.appendChild(Object.assign(document.createElement("div"), { className: "marks" }));
  layer.replaceChildren(...drawn.map((each) => {
    const line = document.createElement("div");
    line.className = `mark ${each.kind}`;
    line.style.left = `${plot.valToPos(each.at, "x")}px`;
    line.append(Object.assign(document.createElement("span"), { textContent: KINDS[each.kind][0] }));
    return line;
  }));
  return visible.length - drawn.length;
}

/** The words of the marks at the cursor, if there are some. */
export function wordsAt(plot, marks, zone) {
  const left = plot.cursor.left;
  const near = marks.filter((each) => Math.abs(plot.valToPos(each.at, "x") - left) <= NEAR);
  return near.map((each) => `${instant(each.at, zone)}: ${words(each, zone)}`);
}

const words = (mark, zone) => mark.text + (mark.because ? ` (${wholeMoments(mark.because, zone)})` : "");

/** @param {{marks: Mark[], left: number, more: boolean}} props `left`: are not drawn; `more`: earlier ones are not here */
export function MarksLegend({ marks, left, more }) {
  if (!marks.length) return null;
  const kinds = NAMES.filter((kind) => marks.some((each) => each.kind === kind));
  return html`<p class="legend marks-legend">${kinds.map((kind) => html`<span key=${kind} class=${`mark-key ${kind}`}>
      <span aria-hidden="true">${KINDS[kind][0]}</span> ${KINDS[kind][1]}</span>`)}
    ${(left > 0 || more) && html`<span class="help">${[left > 0 && `${counted(left, "mark")} not drawn`, more && "earlier changes not listed"]
      .filter(Boolean).join(", ")}: zoom in</span>`}</p>`;
}

/** The same in lines. @param {{marks: Mark[], more: boolean, zone: any}} props */
export function MarksTable({ marks, more, zone }) {
  if (!marks.length) return null;
  const title = more ? `The last ${counted(marks.length, "change")}` : counted(marks.length, "change");
  return html`<details class="changes"><summary>${title} as a table</summary><div class="scroll"><table class="cards">
    <thead><tr><th scope="col">At</th><th scope="col">Change</th><th scope="col">Reason</th></tr></thead>
    <tbody>${marks.map((each, k) => html`<tr key=${k}><td data-label="At" class="time">${instant(each.at, zone)}</td>
      <td data-label="Change"><span class=${`mark-key ${each.kind}`}><span aria-hidden="true">${KINDS[each.kind][0]}</span></span> ${each.text}</td>
      <td data-label="Reason">${each.because ? unbroken(wholeMoments(each.because, zone)) : "–"}</td></tr>`)}</tbody></table></div></details>`;
}
