/** What is wrong with a job: every root cause, the worst first, in the words of the API. */
import { pathOf, read } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePhone, usePoll } from "../lib/hooks.js";
import { link } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { moments } from "../lib/time.js";
import { showStage } from "./pan.js";
import { signOf, wordOf } from "./status.js";

const REFRESH_MS = 2_000;
/** The others are one click away. */
const SHOWN = 5;
/** Before the first answer. */
export const UNKNOWN = Object.freeze([]);

/** @param {string} job @returns {any[]} the worst first */
export function useProblems(job) {
  const { data } = usePoll((signal) => read(`${pathOf(job)}/problems`, { signal }), REFRESH_MS, [job]);
  return data?.job === job ? data.problems : UNKNOWN;
}

/** Each has its number, and its stage in the graph has the numbers of all its problems. @param {{job: string, problems: any[], zone: any}} props */
export function Problems({ job, problems, zone }) {
  if (!problems.length) return null;
  const firstWith = (remedy) => problems.find((each) => each.remedy === remedy);
  const line = (each, k) => html`<${Problem} key=${`${each.stage} ${each.health}`} job=${job} of=${each} number=${k + 1} zone=${zone}
    first=${firstWith(each.remedy)} />`;
  const rest = problems.slice(SHOWN);
  return html`<section class="problems" aria-labelledby="problems-title">
    <h2 id="problems-title">${problems.length === 1 ? "1 problem" : `${problems.length.toLocaleString("en")} problems`}</h2>
    <ol>${problems.slice(0, SHOWN).map(line)}</ol>
    ${rest.length > 0 && html`<details><summary>${rest.length.toLocaleString("en")} more</summary>
      <ol start=${SHOWN + 1}>${rest.map((each, k) => line(each, k + SHOWN))}</ol></details>`}
  </section>`;
}

function Problem({ job, of, number, zone, first }) {
  const mark = () => showStage(of.stage);
  const unmark = () => showStage(null);
  return html`<li class=${of.severity} data-problem=${of.stage} onMouseEnter=${mark} onMouseLeave=${unmark} onFocusIn=${mark} onFocusOut=${unmark}>
    <button type="button" class="number" aria-label=${`Show problem ${number}, ${of.stage}, in the graph`}
      onClick=${() => showStage(of.stage, { scroll: true })}>${number}</button>${" "}
    <span class=${`status ${of.health}`}><span aria-hidden="true">${signOf(of.health)}</span> ${wordOf(of.health)}</span>${" "}
    <a href=${link({ job, stage: of.stage })}>${of.stage}</a>: ${unbroken(moments(of.because, zone))}${single(of)}${waiting(of, of.stage)}
    ${of.remedy && (first === of ? html`<${Remedy} text=${of.remedy} />` : html`<small class="remedy">remedy: as for ${first.stage}</small>`)}</li>`;
}

/** Folded on a phone: the graph begins on the first screen. */
function Remedy({ text }) {
  const remedy = html`<small class="remedy">${unbroken(text)}</small>`;
  return usePhone() ? html`<details><summary>remedy</summary>${remedy}</details>` : remedy;
}

const single = ({ ranges, examples }) => (ranges === 1 && examples.length ? ` (range ${examples[0]})` : "");

/**
 * The stages that wait for a root cause, and those that will.
 * @param {{holds_back?: string[], holds_back_next?: string[]}} of @param {string} [stage] the cause, where its name is not near
 */
export function waiting({ holds_back: held = [], holds_back_next: next = [] }, stage) {
  const which = stage ? ` for ${stage}` : "";
  const now = held.length ? `; ${named(held)} ${held.length > 1 ? "wait" : "waits"}${which}` : "";
  return next.length ? `${now}; ${named(next)} ${next.length > 1 ? "do" : "does"} not wait${which} yet` : now;
}

function named(stages) {
  const more = stages.length > 3 ? ` and ${(stages.length - 3).toLocaleString("en")} more` : "";
  return stages.slice(0, 3).join(", ") + more;
}
