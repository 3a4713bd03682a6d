/** Why a watermark is where it is, in words: the same that the path in the graph shows. */
import { pathOf, read } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { atMostEvery } from "../lib/frames.js";
import { link } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { Fold } from "./fold.js";
import { wordOf } from "./status.js";
import { counted, duration, fromIso, instant, moments, wholeMoments } from "../lib/time.js";

/** The reasons of the API, in words. */
const REASONS = {
  never_reported: "has never reported",
  ended: "is as the last run has left it",
  lease_expired: "has no worker",
  waiting_for_commit: "waits for a commit",
  throttled: "is throttled",
  stalled: "reports, but its oldest work ages",
  buffering: "keeps a hold",
  no_input: "has not seen the newest input",
  idle: "is idle",
  behind: "is the lowest",
};

const REFRESH_MS = 5_000;
const LEAST_MS = 500;
const PATIENCE_MS = 5_000;

/**
 * Ask why, again whenever `version` changes, but not too often.
 *
 * Undefined while the first answer may still come soon: what stands below it would jump when it does. Null if
 * there is none.
 * @param {string} job @param {string | null} stage @param {number} version
 */
export function useExplanation(job, stage, version) {
  const [found, setFound] = useState({ job: "", stage: "", body: null });
  const ask = useRef(() => {});
  useEffect(() => {
    if (!stage) return undefined;
    const ending = new AbortController();
    const keep = (body) => ending.signal.aborted || setFound({ job, stage, body });
    const none = () => ending.signal.aborted || setFound((before) => isOf(before, job, stage) ? before : { job, stage, body: null });
    const load = () => document.hidden ? undefined : read(`${pathOf(job, stage)}/explain?limit=10`, { signal: ending.signal }).then(keep, none);
    const soon = atMostEvery(LEAST_MS, load);
    ask.current = soon;
    soon();
    // What is late, expired or throttled becomes so without an advance.
    const timer = setInterval(soon, REFRESH_MS);
    const patience = setTimeout(none, PATIENCE_MS);
    return () => {
      ending.abort();
      soon.cancel();
      clearInterval(timer);
      clearTimeout(patience);
    };
  }, [job, stage]);
  useEffect(() => ask.current(), [version]);
  return isOf(found, job, stage) ? found.body : undefined;
}

const isOf = (found, job, stage) => found.job === job && found.stage === stage;

/** An idle or ended stage is not held back: its lowest ranges are named all the same. */
const held = ({ stage, health, holders_total: total }) => (health === "idle" || health === "ended"
  ? `${counted(total, "range is", "ranges are")} the lowest of ${stage}` : `${counted(total, "range holds", "ranges hold")} ${stage} back`);

/** @param {{why: any, zone: any, nowMs: number}} props */
export function Explanation({ why, zone, nowMs }) {
  if (!why) return null;
  const path = [...why.path].reverse();
  const holders = `${held(why)}${why.holders_total > why.holders.length
    ? `; the first ${why.holders.length}` : ""}`;
  return html`<section class="why" aria-labelledby="why-title">
    <h2 id="why-title">Why is ${why.stage} where it is?</h2>
    <p class="because">${unbroken(moments(why.because, zone))}</p>
    ${why.remedy && html`<p class="remedy">${unbroken(why.remedy)}</p>`}
    ${why.path.length > 1 && html`<p class="path"><span class="hidden">The path: </span>${path.map((step, k) => html`${k > 0 && html`<span aria-hidden="true"> → </span>`}
      <a href=${link({ job: why.job, stage: step.stage })}>${step.stage}</a>${step.health ? ` (${wordOf(step.health)})` : ""}`)}</p>`}
    ${why.holders.length > 0 && html`<${Fold} title=${holders}><div class="scroll"><table class="cards">
      <caption>${holders}</caption>
      <thead><tr><th scope="col">Range of ${why.holders[0].stage}</th><th scope="col">Reason</th><th scope="col">Promise</th>
        <th scope="col">Without the range</th><th scope="col">Holder</th><th scope="col">Unchanged for</th></tr></thead>
      <tbody>${why.holders.map((each) => html`<tr key=${each.range}>
        <th scope="row">${each.range}</th>
        <td data-label="Reason">${REASONS[each.reason] ?? each.reason}${each.component ? ` (${each.component})` : ""}</td>
        <td data-label="Promise" class="time">${each.promise === null ? "none" : instant(each.promise, zone)}</td>
        <td data-label="Without the range" class="time">${each.would_be === null ? "–" : instant(each.would_be, zone)}</td>
        <td data-label="Holder">${each.holder ?? "none"}</td>
        <td data-label="Unchanged for">${each.since ? duration(Math.max(0, nowMs - fromIso(each.since))) : "–"}</td>
      </tr>`)}</tbody></table></div></${Fold}>`}
    ${why.retired && html`<ul class="retired">${why.retired.map((each) => html`<li key=${`${each.stage} ${each.range}`}>
      ${each.range} of <a href=${link({ job: why.job, stage: each.stage })}>${each.stage}</a> is retired${each.since
        ? unbroken(`, since ${instant(fromIso(each.since), zone)}`) : ""}${each.by ? ` by ${each.by}` : ""}${each.because ? unbroken(`: ${wholeMoments(each.because, zone)}`) : ""}</li>`)}</ul>`}
  </section>`;
}
