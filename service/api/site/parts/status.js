/** How a stage stands, by sign and by word: never by colour alone. */
import { html } from "../lib/html.js";

export const SIGNS = { unknown: "○", active: "●", idle: "◐", final: "■" };
const TITLES = {
  unknown: "No watermark yet: a range has never reported",
  active: "More may come",
  idle: "Nothing comes at the moment, and nobody waits for it",
  final: "Nothing more will come",
};

export const wordOf = (status) => (status === "unknown" ? "waiting" : status);

/** @param {{status: string}} props */
export const Status = ({ status }) =>
  html`<span class=${`status ${status}`} title=${TITLES[status]}><span aria-hidden="true">${SIGNS[status]}</span> ${wordOf(status)}</span>`;
