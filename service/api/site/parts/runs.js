/** Who executes the stage, since when, and how its last runs ended. */
import { pathOf, read } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { steps } from "../lib/job-store.js";
import { unbroken } from "../lib/text.js";
import { duration, fromIso, instant, wholeMoments } from "../lib/time.js";

const REFRESH_MS = 5_000;
const MOST = 5;
const NAMES = { spark: "Spark's UI" };

/** @param {{route: any, stage: any, zone: import("../lib/time.js").Zone, nowMs: number}} props */
export function Runs({ route, stage, zone, nowMs }) {
  const paths = [`${pathOf(route.job)}/runs?stage=${encodeURIComponent(route.stage)}&limit=${MOST}`,
    `${pathOf(route.job, route.stage)}/commits`];
  const { data, problem } = usePoll((signal) => Promise.all(paths.map((path) => read(path, { signal }))), REFRESH_MS, [...paths, ...steps(stage)]);
  return html`<section class="runs" aria-labelledby="runs-title"><h2 id="runs-title">Runs</h2>
    ${problem && !data && html`<p role="alert" class="alert">${problem.message}</p>`}
    ${!data && !problem && html`<p class="empty">Loading…</p>`}
    ${data && html`<${Found} runs=${data[0].runs} current=${data[1].run} stage=${stage} zone=${zone} nowMs=${nowMs} />`}</section>`;
}

function Found({ runs, current, stage, zone, nowMs }) {
  if (!runs.length) return html`<p class="empty">The stage does not have a run.</p>`;
  const now = runs.find((each) => each.run === current);
  return html`<p class="executes">${now ? html`<${Sentence} run=${now} hasWorker=${isHeld(stage)} zone=${zone} nowMs=${nowMs} />` : "The stage does not have a run since the reset."}</p>
    <div class="scroll"><table class="cards"><caption>The last runs</caption>
      <thead><tr><th scope="col">Run</th><th scope="col">Outcome</th><th scope="col">Reason</th><th scope="col">Holder</th>
        <th scope="col">Program</th><th scope="col">Started</th><th scope="col">Duration</th><th scope="col">Last epoch</th><th scope="col">Links</th></tr></thead>
      <tbody>${runs.map((each) => html`<tr key=${each.run}>
        <th scope="row">Run ${each.run}</th>
        <td data-label="Outcome">${outcome(each, current)}</td>
        <td data-label="Reason">${each.because ? unbroken(wholeMoments(each.because, zone)) : "–"}</td>
        <td data-label="Holder">${each.holder}</td>
        <td data-label="Program">${each.program ?? "–"}</td>
        <td data-label="Started" class="time">${each.started_at ? instant(fromIso(each.started_at), zone) : "–"}</td>
        <td data-label="Duration">${lasted(each, current, nowMs)}</td>
        <td data-label="Last epoch">${each.epoch ?? "–"}</td>
        <td data-label="Links"><${Links} of=${each} /></td></tr>`)}</tbody></table></div>`;
}

/** A run executes a stage while a worker holds a range. A stage without ranges, and a final one, need none. */
const isHeld = (stage) => !stage?.ranges.total || stage.status === "final" || stage.ranges.leased > 0;

function Sentence({ run, hasWorker, zone, nowMs }) {
  const who = html`<strong>${run.holder}</strong>${run.program ? ` (${run.program})` : ""}`;
  const began = fromIso(run.started_at);
  if (run.outcome) return html`Run ${run.run} of ${who} ${run.outcome === "stopped" ? "was stopped" : run.outcome} at ${unbroken(instant(fromIso(run.ended_at), zone))}.`;
  const [at, lasts] = began === null ? ["", ""] : [instant(began, zone), duration(Math.max(0, nowMs - began))];
  const does = hasWorker ? `executes the stage${at && ` since ${at}, for ${lasts}`}` : `was opened${at && ` at ${at}, ${lasts} ago`}; no worker holds a range`;
  return html`Run ${run.run} of ${who} ${unbroken(does)}.
    ${" "}<${Links} of=${run} none="" />`;
}

function outcome(run, current) {
  if (run.outcome === "failed") return html`<span class="status failed"><span aria-hidden="true">✕</span> failed</span>`;
  return run.outcome ?? (run.run === current ? "goes on" : "fenced");
}

function lasted(run, current, nowMs) {
  const [began, ended] = [fromIso(run.started_at), fromIso(run.ended_at) ?? (run.run === current ? nowMs : null)];
  return began === null || ended === null ? "–" : duration(Math.max(0, ended - began));
}

/** Links to pages of the program. Others than of the web would be run by the browser. */
function Links({ of, none = "–" }) {
  const safe = Object.entries(of.links).filter(([, address]) => /^https?:/i.test(address));
  return safe.length ? html`<span>${safe.map(([name, address], k) => html`${k > 0 && ", "}<a key=${name} href=${address} target="_blank"
    rel="noopener noreferrer">${NAMES[name] ?? name}</a>`)}</span>` : none;
}
