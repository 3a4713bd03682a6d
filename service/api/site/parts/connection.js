/** Whether what is shown is up to date. */
import { html } from "../lib/html.js";
import { link } from "../lib/route.js";
import { unbroken } from "../lib/text.js";
import { duration } from "../lib/time.js";

/** @param {{connection: import("../lib/job-store.js").Connection}} props */
export function Connection({ connection }) {
  const { state, problem, since } = connection;
  const ago = duration(Math.floor((Date.now() - since) / 1_000) * 1_000);
  if (state === "refused") {
    return html`<p role="alert" class="alert">${problem?.message}
      ${problem?.status === 404 && html` <a href=${link()}>All jobs</a>`}</p>`;
  }
  return html`<p role="status" class=${`connection ${state}`} data-state=${state}>
    ${state === "live" && html`<span aria-hidden="true">●</span> live`}
    ${state === "connecting" && "connecting"}
    ${state === "lost" && html`<strong>Connection lost</strong> <span aria-hidden="true">${unbroken(ago)} ago</span>.
      What you see may be out of date. Trying again.`}
  </p>`;
}
