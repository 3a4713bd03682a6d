/** One job: its graph, what holds it back, its stages. It moves as events come. */
import { html } from "../lib/html.js";
import { useJob, useNow } from "../lib/hooks.js";
import { Connection } from "../parts/connection.js";
import { Danger } from "../parts/danger.js";
import { Explanation, useExplanation } from "../parts/explanation.js";
import { Graph } from "../parts/graph.js";
import { Problems, UNKNOWN, useProblems } from "../parts/problems.js";
import { StageTable } from "../parts/stage-table.js";

/** How often lags are written again of stages that have not moved. */
const TICK_MS = 1_000;
const TICK_MANY_MS = 5_000;
const MANY = 200;

export function JobView({ route, me, zone }) {
  const store = useJob(route.job);
  const nowMs = useNow((store?.graph?.size ?? 0) > MANY ? TICK_MANY_MS : TICK_MS);
  const asked = route.query.get("why");
  const problems = useProblems(route.job);
  const stage = store?.graph ? (store.graph.has(asked) ? asked : troubled(store, problems)) : null;
  const why = useExplanation(route.job, stage, store?.version ?? 0);
  if (!store) return null;
  const given = { store, why, problems, route, zone, nowMs };
  const ready = store.graph && store.stages.size > 0;
  return html`
    <div class="heading"><h1>${route.job}</h1><${Connection} connection=${store.connection} /></div>
    ${ready && html`
      <${Problems} job=${route.job} problems=${problems} zone=${zone} />
      <${Graph} ...${given} />
      <${Explanation} why=${why} zone=${zone} nowMs=${nowMs} />
      <${StageTable} ...${given} />
      <${Danger} job=${route.job} me=${me} />`}`;
}

const NOT_WAITED_FOR = { idle: 1, final: 2 };

/** What is explained unless something else is asked: the last stage that waits for the worst problem that any waits for. */
function troubled(store, problems) {
  const worst = problems.find((each) => each.holds_back.length) ?? problems[0];
  if (!worst) return problems === UNKNOWN ? null : lastInLine(store);
  return worst.holds_back.at(-1) ?? worst.stage;
}

/** The lowest of the stages that nobody reads, an active one before an idle one. */
function lastInLine(store) {
  const isRead = new Set([...store.graph.values()].flatMap((node) => node.inputs));
  const output = (name) => store.stages.get(name)?.output_watermark ?? -Infinity;
  const rank = (name) => NOT_WAITED_FOR[store.stages.get(name)?.status] ?? 0;
  const isBefore = (a, b) => (rank(a) === rank(b) ? output(a) < output(b) : rank(a) < rank(b));
  const sinks = [...store.graph.keys()].filter((name) => !isRead.has(name));
  return sinks.reduce((lowest, name) => (isBefore(name, lowest) ? name : lowest), sinks[0]);
}
