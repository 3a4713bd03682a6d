/**
 * The place of the graph: what fits is shown whole, and readable. What does not is panned, with shadows at the
 * edges that hide something and a line that counts the stages in view.
 */
import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib/html.js";
import { oncePerFrame } from "../lib/frames.js";
import { NODE } from "../lib/layout.js";
import { changed, go } from "../lib/route.js";
import { counted } from "../lib/time.js";

const MARGIN = 6;
const ZOOMS = [0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1, 1.25, 1.5];
/** Smaller, the text has less than 11 pixels: then it is panned. */
const LEAST_ZOOM = 0.92;
const SCROLL_BAR = 16;
/** The graph ends above the lower edge of the window, unless hardly a stage would be left of it. */
const LEAST_HEIGHT = 350;
const BELOW = 12;
/** The mouse has dragged, not clicked. */
const DRAGGED = 5;
const SHOW = "showstage";
/** Without a step for so long, an animated scroll is over. */
const STILL_MS = 1_000;
/** The viewer scrolls by one of these. */
const INPUTS = ["pointerdown", "keydown", "wheel", "touchmove"];

/** Bring a stage of the graph into view, and mark it; null marks none. */
export const showStage = (name, { scroll = false } = {}) => dispatchEvent(new CustomEvent(SHOW, { detail: { name, scroll } }));

/** @param {{drawn: import("../lib/layout.js").Layout, cause: string | null, route: any, children: any}} props */
export function Pan({ drawn, cause, route, children }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const moved = useRef(false);
  const [seen, setSeen] = useState(drawn.places.size);
  const zoom = Number(route.query.get("zoom")) || 0;
  const size = { width: drawn.width + 2 * MARGIN, height: drawn.height + 2 * MARGIN };
  const latest = useRef({});
  latest.current = { drawn, cause, size, zoom };
  const look = () => box.current && setSeen(inView(box.current, latest.current.drawn, latest.current.size));
  const fit = () => {
    resize(box.current, latest.current.size, latest.current.zoom);
    if (!moved.current) centre(box.current, latest.current);
    look();
  };
  useLayoutEffect(fit, [drawn, zoom, cause]);
  useEffect(() => {
    const again = oncePerFrame(look);
    const element = box.current;
    const watch = new ResizeObserver(oncePerFrame(() => box.current && fit()));
    watch.observe(element.parentElement);
    element.addEventListener("scroll", again, { passive: true });
    const move = () => (moved.current = true);
    for (const input of INPUTS) element.addEventListener(input, move, { passive: true });
    // The browser scrolls to a stage that gets the focus, from a key that was pressed elsewhere.
    element.addEventListener("focusin", ({ target }) => target !== element && move());
    const ends = [() => watch.disconnect(), again.cancel, dragged(element), pointedOut(element, latest, move)];
    return () => ends.forEach((end) => end());
  }, []);
  const to = (step) => () => go(changed(route, { zoom: stepped(box.current, size.width, step) }), { replace: true });
  const whole = () => {
    moved.current = false;
    if (zoom) go(changed(route, { zoom: null }), { replace: true });
    settled(box.current, () => box.current && fit());
  };
  const total = drawn.places.size;
  return html`
    <div class="heading"><h2 id="graph-title">Graph</h2><div class="tools">
      <button type="button" onClick=${to(-1)} aria-label="Smaller">−</button>
      <button type="button" onClick=${to(1)} aria-label="Larger">+</button>
      <button type="button" onClick=${whole}>Centre</button></div></div>
    ${seen < total && html`<p class="in-view" aria-live="off"><strong>${seen.toLocaleString("en")} of ${counted(total, "stage")} in view.</strong>
      ${" "}Scroll or drag for the others${cause ? html`; <i>Centre</i> returns to ${cause}` : ""}.</p>`}
    <div class="pan"><div class="canvas" ref=${box} tabindex="0" role="group" aria-label="The graph: sources left, sinks right">
      <svg viewBox=${`${-MARGIN} ${-MARGIN} ${size.width} ${size.height}`}>${children}</svg></div></div>`;
}

const scaleOf = (box, width) => Number(box.firstElementChild.getAttribute("width")) / width;

function resize(box, { width, height }, zoom) {
  const tall = limit(box);
  const wide = box.parentElement.clientWidth;
  const across = Math.max(LEAST_ZOOM, Math.min(1, wide / width));
  const both = Math.max(LEAST_ZOOM, Math.min(across, tall / height));
  // A bar at the side takes from the width.
  const scale = zoom || (height * both > tall ? Math.max(LEAST_ZOOM, Math.min(both, (wide - SCROLL_BAR) / width)) : both);
  const svg = box.firstElementChild;
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
}

/** Limit the height by the style and by the window; return the limit. */
function limit(box) {
  box.style.maxHeight = "";
  const styled = Number.parseFloat(getComputedStyle(box).maxHeight) || Infinity;
  const room = innerHeight - (box.getBoundingClientRect().top + scrollY) - BELOW;
  const tall = Math.min(styled, Math.max(LEAST_HEIGHT, room));
  box.style.maxHeight = `${tall}px`;
  return tall;
}

/** Put the cause into the middle, or as near as there is something to scroll. */
function centre(box, { drawn, cause, size }) {
  const place = drawn.places.get(cause);
  if (!place) return;
  const scale = scaleOf(box, size.width);
  box.scrollLeft = (place.x + NODE.width / 2 + MARGIN) * scale - box.clientWidth / 2;
  box.scrollTop = (place.y + NODE.height / 2 + MARGIN) * scale - box.clientHeight / 2;
}

/**
 * Scroll by `put`, and again at the end of a scroll that is under way: the browser goes on with an animated scroll
 * from where a script has put it, by as much as was left. The scroll of the script has an end of its own before,
 * so not the first end counts, but stillness. The next input of the viewer ends this too.
 */
function settled(box, put) {
  const ending = new AbortController();
  const { signal } = ending;
  const end = () => ending.abort();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(end, STILL_MS);
  };
  box.addEventListener("scroll", wait, { signal, passive: true });
  box.addEventListener("scrollend", put, { signal });
  for (const input of INPUTS) box.addEventListener(input, end, { signal, passive: true });
  wait();
  put();
}

/** Count the stages that are wholly in view, and have the edges show where there is more. */
function inView(box, { places }, { width }) {
  const { scrollLeft: left, scrollTop: top, clientWidth, clientHeight, scrollWidth, scrollHeight } = box;
  const hidden = { left: left > 1, top: top > 1, right: scrollWidth - left - clientWidth > 1, bottom: scrollHeight - top - clientHeight > 1 };
  box.parentElement.dataset.more = Object.keys(hidden).filter((edge) => hidden[edge]).join(" ");
  const scale = scaleOf(box, width);
  let seen = 0;
  for (const { x, y } of places.values()) {
    const [x0, y0] = [(x + MARGIN) * scale - left, (y + MARGIN) * scale - top];
    if (x0 >= -1 && y0 >= -1 && x0 + NODE.width * scale <= clientWidth + 1 && y0 + NODE.height * scale <= clientHeight + 1) seen += 1;
  }
  return seen;
}

function stepped(box, width, step) {
  const scale = scaleOf(box, width);
  const rest = step > 0 ? ZOOMS.filter((each) => each > scale + 0.01) : ZOOMS.filter((each) => each < scale - 0.01);
  return (step > 0 ? rest[0] : rest[rest.length - 1]) ?? scale.toFixed(2);
}

/** Dragging with the mouse pans; fingers do so by themselves. The click that ends it opens nothing. */
function dragged(box) {
  const ending = new AbortController();
  const { signal } = ending;
  let from = null;
  let far = false;
  box.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    from = { x: event.clientX + box.scrollLeft, y: event.clientY + box.scrollTop, startX: event.clientX, startY: event.clientY };
    far = false;
  }, { signal });
  addEventListener("pointermove", (event) => {
    if (!from) return;
    far ||= Math.hypot(event.clientX - from.startX, event.clientY - from.startY) > DRAGGED;
    if (!far) return;
    box.scrollLeft = from.x - event.clientX;
    box.scrollTop = from.y - event.clientY;
  }, { signal });
  addEventListener("pointerup", () => (from = null), { signal });
  box.addEventListener("dragstart", (event) => event.preventDefault(), { signal });
  box.addEventListener("click", (event) => {
    if (far) event.preventDefault();
    far = false;
  }, { signal, capture: true });
  return () => ending.abort();
}

/** Mark the stage that `showStage` names. A later fit must not take a stage out of view that the viewer chose. */
function pointedOut(box, latest, move) {
  const show = ({ detail: { name, scroll } }) => {
    box.querySelector("[data-marked]")?.removeAttribute("data-marked");
    if (name === null) return;
    box.querySelector(`[data-stage="${CSS.escape(name)}"]`)?.setAttribute("data-marked", "");
    if (!scroll) return;
    move();
    settled(box, () => centre(box, { ...latest.current, cause: name }));
    box.scrollIntoView({ block: "nearest" });
  };
  addEventListener(SHOW, show);
  return () => removeEventListener(SHOW, show);
}
