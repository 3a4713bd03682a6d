/** When will the output watermark be there? */
import { pathOf, read } from "../lib/api.js";
import { html } from "../lib/html.js";
import { usePoll } from "../lib/hooks.js";
import { changed, go } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { duration, fromInput, fromIso, instant, isInstant, minute, moments, toInput, zoneName } from "../lib/time.js";

const REFRESH_MS = 5_000;
const HOUR_MS = 3_600_000;

/** @param {{route: any, stage: any, zone: import("../lib/time.js").Zone, nowMs: number}} props */
export function Eta({ route, stage, zone, nowMs }) {
  const at = Number(route.query.get("at")) || null;
  const output = stage?.output_watermark;
  const start = at ?? (isInstant(output) ? Math.floor(output / HOUR_MS + 1) * HOUR_MS : null);
  const ask = (event) => {
    event.preventDefault();
    const ms = fromInput(new FormData(event.target).get("at"), zone);
    if (ms !== null) go(changed(route, { at: ms }), { replace: true });
  };
  return html`<section aria-labelledby="eta-title">
    <h2 id="eta-title">When will it be done?</h2>
    <form class="ask" onSubmit=${ask}>
      <label for="at">Everything before</label>
      <input id="at" name="at" type="datetime-local" step="1" required defaultValue=${toInput(start, zone)} key=${`${at} ${zone} ${start === null}`} />
      <span class="zone">${zoneName(zone)}</span>
      <button type="submit">has arrived when?</button>
    </form>
    ${at !== null && html`<${Answer} route=${route} at=${at} zone=${zone} nowMs=${nowMs} />`}
  </section>`;
}

function Answer({ route, at, zone, nowMs }) {
  const path = `${pathOf(route.job, route.stage)}/eta?at=${at}`;
  const { data, problem } = usePoll((signal) => read(path, { signal }), REFRESH_MS, [path]);
  if (problem) return html`<p role="alert" class="alert">${problem.message}</p>`;
  if (!data || data.at !== at) return null;
  return html`<p class="answer" role="status">${sentence(data, route.stage, zone, nowMs)}</p>`;
}

function sentence(data, stage, zone, nowMs) {
  const at = unbroken(instant(data.at, zone));
  const because = unbroken(moments(data.because, zone));
  if (data.reached) return html`<strong>${stage} has reached ${at}</strong>: ${because}.`;
  if (data.expected_at === null) return html`<strong>An estimate for ${at} is not possible</strong>: ${because}.`;
  const expected = fromIso(data.expected_at);
  const [low, high] = data.between.map(fromIso);
  return html`<strong>${stage} reaches ${at} at about ${unbroken(minute(expected, zone))}, in ${unbroken(duration(Math.max(0, expected - nowMs)))}.</strong>
    ${" "}In ${Math.round(data.confidence * 100)} of 100 cases, the moment is between ${unbroken(instant(low, zone))} and
    ${" "}${unbroken(instant(high, zone))}: ${because}.`;
}
