/** All jobs: the worst health first, and of equal ones what stands still for longest. */
import { read } from "../lib/api.js";
import { html, useRef } from "../lib/html.js";
import { useNow, usePoll } from "../lib/hooks.js";
import { changed, go, link } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { counted, duration, fromIso, instant, lagText, moments } from "../lib/time.js";
import { waiting } from "../parts/problems.js";
import { Status } from "../parts/status.js";
import { Sparkline } from "../parts/sparkline.js";

const REFRESH_MS = 2_000;
const PAGE = 100;
/** A stage that has not moved for so long is pointed out. */
const STILL_MS = 60_000;

export function JobsView({ route, zone }) {
  const search = route.query.get("q") ?? "";
  const limit = Number(route.query.get("n")) || PAGE;
  const path = `/v1/overview?limit=${limit}&search=${encodeURIComponent(search)}`;
  const { data, problem } = usePoll((signal) => read(path, { signal }), REFRESH_MS, [path]);
  const nowMs = useNow();
  return html`
    <div class="heading"><h1>Jobs</h1><${Search} route=${route} value=${search} />
      <p role="status" class=${problem ? "connection lost" : "connection live"}>
        ${problem ? `${problem.message} What you see may be out of date. Trying again.` : data && told(data)}</p>
    </div>
    ${data && !data.total && html`<p class="empty">There are no jobs yet. A pipeline defines its own when it starts;
      <code>make demo</code> shows one.</p>`}
    ${data && data.total > 0 && html`<div class="scroll"><table class="cards">
      <caption class="hidden">Jobs, the worst first</caption>
      <thead><tr><th scope="col">Job</th><th scope="col">State</th><th scope="col">Slowest stage</th>
        <th scope="col">Output watermark</th><th scope="col">Lag</th><th scope="col">Unchanged for</th>
        <th scope="col">Last hour</th></tr></thead>
      <tbody>${data.jobs.map((job) => html`<${Row} key=${job.job} job=${job} nowMs=${nowMs} zone=${zone} />`)}</tbody>
    </table></div>`}
    ${data && data.matching > data.jobs.length && html`<p><a class="button"
      href=${changed(route, { n: limit + PAGE })}>Show more</a></p>`}`;
}

const told = (data) => (data.matching < data.total
  ? `${data.matching.toLocaleString("en")} of ${counted(data.total, "job")}` : counted(data.total, "job"));

function Search({ route, value }) {
  const timer = useRef(0);
  const search = (event) => {
    const text = event.target.value;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => go(changed(route, { q: text, n: null }), { replace: true }), 150);
  };
  return html`<form role="search" onSubmit=${(event) => event.preventDefault()}>
    <label class="hidden" for="search">Search jobs by name</label>
    <input id="search" type="search" placeholder="Search" value=${value} maxlength="128" onInput=${search} />
  </form>`;
}

function Row({ job, nowMs, zone }) {
  const stillMs = nowMs - fromIso(job.since);
  const still = job.status !== "final" && stillMs > STILL_MS;
  return html`<tr data-job=${job.job}>
    <th scope="row"><a href=${link({ job: job.job })}>${job.job}</a> <small>${counted(job.stages, "stage")}</small></th>
    <td data-label="State"><${Status} of=${job} />${job.late_ranges > 0 && html`<span class="chip late">late ranges ${job.late_ranges.toLocaleString("en")}</span>`}${job.because && html`<small class="cause">${unbroken(moments(job.cause ?? job.because, zone))}${waiting(job)}</small>`}</td>
    <td data-label="Slowest stage"><a href=${link({ job: job.job, stage: job.slowest })}>${job.slowest}</a></td>
    <td data-label="Output watermark" class="time">${instant(job.output_watermark, zone)}</td>
    <td data-label="Lag">${lagText(job.output_watermark, nowMs)}</td>
    <td data-label="Unchanged for" class=${still ? "still" : ""}>${duration(stillMs)}</td>
    <td data-label="Last hour"><${Sparkline} job=${job.job} stage=${job.slowest} /></td>
  </tr>`;
}
