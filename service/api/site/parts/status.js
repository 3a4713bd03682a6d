/** How a stage stands, by sign and by word: never by colour alone. Its health comes before its status. */
import { html } from "../lib/html.js";

const KINDS = {
  failed: ["✕", "failed", "Its last run has failed"],
  no_worker: ["✕", "no worker", "Some of its ranges are without a lease, or its last run was stopped"],
  silent: ["○", "silent", "A range has never reported, and all wait for it"],
  stalled: ["▲", "stalled", "Its workers report, but a promise stands still and its oldest work ages"],
  waiting: ["◌", "waiting", "It is where its inputs let it be, and one of them is in trouble"],
  ended: ["□", "ended", "Its last run has finished"],
  unknown: ["○", "no watermark", "No watermark yet"],
  active: ["●", "active", "More may come"],
  idle: ["◐", "idle", "Nothing comes at the moment, and it is not waited for"],
  final: ["■", "final", "Nothing more will come"],
};

const UNWELL = new Set(["failed", "no_worker", "silent", "stalled", "waiting"]);

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

/** @param {{of: {status?: string, health?: string | null} | undefined}} props */
export function Status({ of }) {
  const kind = kindOf(of);
  const [sign, word, title] = known(kind);
  return html`<span class=${`status ${kind}`} title=${title}><span aria-hidden="true">${sign}</span> ${word}</span>`;
}
