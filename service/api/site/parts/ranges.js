/** The ranges of a stage: the map, and lists of those that matter. */
import { pathOf, read } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { changed } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { counted, duration, fromIso, instant, isInstant } from "../lib/time.js";
import { HeatMap } from "./heat-map.js";
import { Retire } from "./retire.js";
import { NO_RANGES } from "./status.js";

const REFRESH_MS = 2_000;
/** To count a million takes the service some time: it is asked less often. */
const MANY = 100_000;
const REFRESH_MANY_MS = 10_000;
const CELLS = 400;
const PAGE = 20;
const MOST = 1_000;
const LISTS = [
  ["slowest", "Slowest"], ["expired", "No worker"], ["never_reported", "Never reported"], ["idle", "Idle"],
  ["final", "Final"], ["retired", "Retired"], ["all", "All"],
];

/** @param {{route: any, me: import("../lib/api.js").Me, stage: any, throttle: any, zone: import("../lib/time.js").Zone, nowMs: number}} props */
export function Ranges({ route, me, stage, throttle, zone, nowMs }) {
  const show = route.query.get("show") ?? "slowest";
  const limit = Math.min(Number(route.query.get("n")) || PAGE, MOST);
  const [from, to] = [route.query.get("rf"), route.query.get("rt")];
  const window = to === null ? "" : `&from=${Number(from) || 0}&to=${Number(to) || 1}`;
  const path = `${pathOf(route.job, route.stage)}/range-summary?buckets=${CELLS}&show=${encodeURIComponent(show)}&limit=${limit}${window}`;
  const ms = (stage?.ranges.total ?? 0) > MANY ? REFRESH_MANY_MS : REFRESH_MS;
  const { data, problem } = usePoll((signal) => read(path, { signal }), ms, [path]);
  if (problem && !data) return html`<p role="alert" class="alert">${problem.message}</p>`;
  if (!data) return null;
  if (!data.total) return html`<section><h2>Ranges</h2><p class="empty">The ranges of the stage: ${NO_RANGES}. Its output is its input.</p></section>`;
  // A stage that waits has not lost its worker: that would be its health. So the run of its ranges has finished.
  const ended = stage?.health === "ended" || (stage?.health === "waiting" && data.counts.expired > 0);
  return html`<section class="ranges" aria-labelledby="ranges-title">
    <h2 id="ranges-title" tabindex="-1">Ranges</h2>
    <${HeatMap} summary=${data} route=${route} zone=${zone} health=${stage?.health} ended=${ended} />
    <nav class="tools" aria-label="Which ranges to list">${LISTS.map(([name, title]) => html`<a class="button"
      href=${changed(route, { show: name === "slowest" ? null : name, n: null })}
      aria-current=${name === show ? "true" : undefined}>${name === "expired" && ended ? "Ended" : title}${count(data, name)}</a>`)}</nav>
    <${List} data=${data} show=${show} stage=${stage} ended=${ended} throttled=${throttle?.shards[route.stage] ?? {}} route=${route} me=${me} zone=${zone} nowMs=${nowMs} />
    ${data.matching > data.listed.length && limit < MOST && html`<p>
      <a class="button" href=${changed(route, { n: Math.min(limit * 5, MOST) })}>Show more</a></p>`}
  </section>`;
}

const count = (data, name) => (name in data.counts ? ` ${data.counts[name].toLocaleString("en")}` : "");

/** The ranges that are listed, in words. */
function captionOf(data, show, stage) {
  const which = show === "slowest" ? chosen(data, stage) : "";
  if (data.total === 1) return `The only range${which && `,${which}`}`;
  return `${data.listed.length.toLocaleString("en")} of ${counted(data.matching, "range")}${which}`;
}

/** The ranges that count, in words: a final stage waits for none. */
function chosen({ counts, matching, total }, stage) {
  if (stage?.status !== "final") return matching < total ? " that the stage waits for" : "";
  if (!counts.never_reported) return " whose rows are late: the stage is final";
  const [are, them] = matching === 1 ? ["which is", "it"] : ["that are", "them"];
  return ` ${are} not final: the stage is final, and does not wait for ${them}`;
}

function List({ data, show, stage, ended, throttled, route, me, zone, nowMs }) {
  const { lowest } = data;
  const may = me.role === "admin";
  if (!data.listed.length) return html`<p class="empty">${show === "slowest"
    ? "The stage waits for none of them: each is final, idle or retired." : "There are none."}</p>`;
  return html`<div class="scroll"><table class="cards"><caption>${captionOf(data, show, stage)}</caption>
    <thead><tr><th scope="col">Range</th><th scope="col">Condition</th><th scope="col">Promise</th>
      <th scope="col">Ahead of the lowest</th><th scope="col">Holds</th><th scope="col">Holder</th>
      <th scope="col">Held for</th><th scope="col">Reported</th><th scope="col">Unchanged for</th>
      ${may && html`<th scope="col"><span class="hidden">Change</span></th>`}</tr></thead>
    <tbody>${data.listed.map((each) => html`<tr key=${each.range}>
      <th scope="row">${each.range}</th>
      <td data-label="Condition" class=${`condition ${ended ? "" : classOf(each)}`}>${shownAs(conditionOf(each, ended), each.range in throttled)}</td>
      <td data-label="Promise" class="time">${each.promise === null ? "none" : instant(each.promise, zone)}</td>
      <td data-label="Ahead of the lowest">${isInstant(each.promise) && isInstant(lowest) && each.condition !== "retired" ? unbroken(duration(Math.max(0, each.promise - lowest))) : "–"}</td>
      <td data-label="Holds">${holds(each.holds, zone)}</td>
      <td data-label="Holder">${each.holder ?? "none"}</td>
      <td data-label="Held for">${since(each.held_since, nowMs)}</td>
      <td data-label="Reported">${each.reported_at ? html`<span>${since(each.reported_at, nowMs)} ago</span>` : "–"}</td>
      <td data-label="Unchanged for">${since(each.since, nowMs)}</td>
      ${may && html`<td>${SETTLED.has(each.condition) ? "" : html`<${Retire} route=${route} range=${each.range} zone=${zone} />`}</td>`}
    </tr>`)}</tbody></table></div>`;
}

const classOf = (each) => (each.stalled ? "stalled" : each.condition);

/** A range without a lease has no worker; after a run that has finished, it needs none. A report need not promise. */
function conditionOf({ condition, stalled, reported_at: reportedAt }, ended) {
  if (stalled) return "stalled";
  if (condition === "expired") return ended ? "ended" : "no worker";
  return condition === "never_reported" && reportedAt ? "no promise yet" : condition.replace("_", " ");
}

/** A throttled reader that is active is shown as throttled. Any other one is idle or without a worker, and throttled besides. */
function shownAs(condition, isThrottled) {
  if (!isThrottled) return condition;
  return condition === "active" ? "throttled" : `${condition}, throttled`;
}

const SETTLED = new Set(["final", "retired"]);

const since = (iso, nowMs) => (iso ? unbroken(duration(Math.max(0, nowMs - fromIso(iso)))) : "–");

const holds = (found, zone) => unbroken(Object.entries(found).map(([name, at]) => `${name} ${instant(at, zone)}`).join(", ") || "–");
