/** One stage: where its watermarks are and were, its ranges, and when it will be done. */
import { html } from "../lib/html.js";
import { useJob, useNow } from "../lib/hooks.js";
import { link } from "../lib/route.js";
import { instant, lagText } from "../lib/time.js";
import { Connection } from "../parts/connection.js";
import { Eta } from "../parts/eta.js";
import { Explanation, useExplanation } from "../parts/explanation.js";
import { Fold } from "../parts/fold.js";
import { HistoryChart } from "../parts/history-chart.js";
import { Ranges } from "../parts/ranges.js";
import { Runs } from "../parts/runs.js";
import { badgesOf } from "../parts/stage-box.js";
import { NO_RANGES, Status, systemLag } from "../parts/status.js";
import { Throttled } from "../parts/throttled.js";

export function StageView({ route, me, zone }) {
  const store = useJob(route.job);
  const nowMs = useNow();
  const stage = store?.stages.get(route.stage);
  const why = useExplanation(route.job, stage ? route.stage : null, store?.version ?? 0);
  if (!store) return null;
  const given = { route, stage, zone, nowMs };
  const missing = store.graph && !store.graph.has(route.stage);
  return html`
    <div class="heading"><h1>${route.stage}</h1><${Connection} connection=${store.connection} /></div>
    ${missing && html`<p role="alert" class="alert">The job ${route.job} has no stage ${route.stage}.
      <a href=${link({ job: route.job })}>Its stages</a></p>`}
    ${stage && html`<${Facts} ...${given} throttled=${store.throttle?.shards[route.stage]} />`}
    ${stage && why !== undefined && html`
      <${Explanation} why=${why} zone=${zone} nowMs=${nowMs} />
      <${Fold} title=${html`<h2>Watermarks over time</h2>`} open=${asks(route, "from", "to", "span")}><${HistoryChart} ...${given} /></${Fold}>
      <${Fold} title=${html`<h2>Runs</h2>`}><${Runs} ...${given} /></${Fold}>
      <${Fold} title=${html`<h2>When will it be done?</h2>`} open=${asks(route, "at")}><${Eta} ...${given} /></${Fold}>
      <${Throttled} throttle=${store.throttle} stage=${route.stage} zone=${zone} />
      <${Fold} title=${html`<h2>Ranges</h2>`} open=${asks(route, "show", "n", "rf", "rt")}><${Ranges} ...${given} me=${me} throttle=${store.throttle} /></${Fold}>`}`;
}

const asks = (route, ...names) => names.some((name) => route.query.has(name));

function Facts({ stage, throttled, zone, nowMs }) {
  const { total, reported, idle, final, leased, retired = 0 } = stage.ranges;
  const late = stage.late_ranges ?? 0;
  const facts = [
    ["State", html`<${Status} of=${stage} />${badgesOf(stage, throttled).map((text) => html`<span class=${`chip ${text.split(" ")[0]}`}>${text}</span>`)}`],
    ["Output watermark", html`<span class="time" data-fact="output">${instant(stage.output_watermark, zone)}</span>`],
    ["Input watermark", stage.input_watermark === null ? "–" : html`<span class="time">${instant(stage.input_watermark, zone)}</span>`],
    ["Data lag", lagText(stage.output_watermark, nowMs)],
    ["System lag", systemLag(stage, nowMs) ?? "–"],
    ["Late rows", stage.records == null ? "–" : `${stage.late.toLocaleString("en")} of ${stage.records.toLocaleString("en")}`],
    ...(stage.corrections > 0 ? [["Corrections", stage.corrections.toLocaleString("en")]] : []),
    ["Ranges", total ? [`${reported.toLocaleString("en")} of ${total.toLocaleString("en")} reported`,
      `${leased.toLocaleString("en")} leased`, idle && `${idle.toLocaleString("en")} idle`,
      final && `${final.toLocaleString("en")} final`,
      late && `${late.toLocaleString("en")} late`,
      retired && `${retired.toLocaleString("en")} retired`].filter(Boolean).join(", ") : NO_RANGES],
    ...Object.entries(stage.percentiles ?? {}).map(([percentage, at]) => [
      `${percentage} % of what is in flight is after`,
      html`<span class="time">${at === null ? "not known" : instant(at, zone)}</span>`]),
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
