/** How a stage stands, by sign and by word: never by colour alone. Its health comes before its status. */
import { html } from "../lib/html.js";
import { duration, isInstant } from "../lib/time.js";

const KINDS = {
  unpublished: ["✕", "unpublished", "The ranges have moved on, and a store does not take the advance"],
  failed: ["✕", "failed", "The last run failed"],
  no_worker: ["✕", "no worker", "A range that counts has no current lease, or the last run was stopped"],
  silent: ["○", "silent", "A range has never reported, and all wait for the range"],
  stalled: ["▲", "stalled", "Reports keep coming, a promise stands still, and its oldest work ages"],
  waiting: ["◌", "waiting", "The stage has followed its inputs, and one of the inputs is in trouble"],
  ended: ["□", "ended", "The last run finished"],
  unknown: ["○", "unknown", "The stage does not have a watermark yet"],
  active: ["●", "active", "More may come"],
  idle: ["◐", "idle", "Nothing comes at the moment, and stages below do not wait"],
  final: ["■", "final", "Nothing more will come"],
};

const UNWELL = new Set(["unpublished", "failed", "no_worker", "silent", "stalled", "waiting"]);

/**
 * What a stage or a job is shown as: its health, unless that is well or not known.
 * @param {{status?: string, health?: string | null} | undefined} of
 */
export const kindOf = (of) => (of?.health && of.health !== "ok" ? of.health : of?.status ?? "unknown");

const known = (kind) => KINDS[kind] ?? ["○", kind, ""];
/** What an operator has to see: `unknown` is not among them, as it passes by itself. */
export const isUnwell = (kind) => UNWELL.has(kind);
export const signOf = (kind) => known(kind)[0];
export const wordOf = (kind) => known(kind)[1];

/** The ranges of a passthrough stage, as commands write them. */
export const NO_RANGES = "none of its own";

/** Without work that ages: the lag of such a stage is as the service has computed it, and does not count on. */
const RESTING = new Set(["idle", "ended", "final"]);

/**
 * The system lag as text. Null: it is not known.
 * @param {import("../lib/job-store.js").Stage | undefined} stage @param {number} nowMs
 */
export function systemLag(stage, nowMs) {
  if (!isInstant(stage?.processing_watermark)) return null;
  return duration(RESTING.has(kindOf(stage)) ? stage.system_lag_ms : Math.max(0, nowMs - stage.processing_watermark));
}

/** What does not move although it is sound: a stage below an input that has ended, or a job whose slowest stage has. */
export function endedOf(of) {
  if (!of || (of.health && of.health !== "ok")) return "";
  if (of.input_ended) return "input ended";
  return of.slowest_ended ? `${of.slowest} has ended` : "";
}

/** @param {{of: {status?: string, health?: string | null, input_ended?: boolean} | undefined}} props */
export function Status({ of }) {
  const kind = kindOf(of);
  const [sign, word, title] = known(kind);
  return html`<span class=${`status ${kind}`} title=${title}><span aria-hidden="true">${sign}</span> ${[word, endedOf(of)].filter(Boolean).join(", ")}</span>`;
}
