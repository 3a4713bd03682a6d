/** What is wrong with a job: every root cause, the worst first, in the words of the API. */
import { pathOf, read } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { link } from "../lib/route.js";
import { signOf, wordOf } from "./status.js";

const REFRESH_MS = 2_000;
/** More are counted. */
const SHOWN = 10;

/** @param {{job: string}} props */
export function Problems({ job }) {
  const { data } = usePoll((signal) => read(`${pathOf(job)}/problems`, { signal }), REFRESH_MS, [job]);
  if (!data || data.job !== job || !data.problems.length) return null;
  const more = data.problems.length - SHOWN;
  return html`<section class="problems" aria-labelledby="problems-title">
    <h2 id="problems-title">Problems</h2>
    <ul>${data.problems.slice(0, SHOWN).map((each) => html`<li key=${`${each.stage} ${each.health}`} class=${each.severity}
        data-problem=${each.stage}>
      <span class=${`status ${each.health}`}><span aria-hidden="true">${signOf(each.health)}</span> ${wordOf(each.health)}</span>${" "}
      <a href=${link({ job, stage: each.stage })}>${each.stage}</a>: ${each.because}${waiting(each.holds_back)}</li>`)}</ul>
    ${more > 0 && html`<p class="help">and ${more.toLocaleString("en")} more</p>`}
  </section>`;
}

function waiting(stages) {
  if (!stages.length) return "";
  const named = stages.slice(0, 3).join(", ");
  return `. For it waits ${named}${stages.length > 3 ? ` and ${(stages.length - 3).toLocaleString("en")} more` : ""}`;
}
