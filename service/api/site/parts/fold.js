/** A part of a view that a phone shows folded: its status, its cause and its watermark stay on the first screen. */
import { html, useState } from "../lib/html.js";
import { usePhone } from "../lib/hooks.js";

/**
 * The parts of a folded fold are not drawn, so they send no requests.
 * @param {{title: any, open?: boolean, children: any}} props `open`: the link shows something of it
 */
export function Fold({ title, open = false, children }) {
  const [isOpen, setOpen] = useState(open);
  if (!usePhone()) return children;
  return html`<details class="fold" open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${title}</summary>${isOpen && children}</details>`;
}
