/** Hooks: what a part of the page follows while it is shown. */
import { now } from "./api.js";
import { JobStore } from "./job-store.js";
import { useEffect, useRef, useState } from "./html.js";

/**
 * Follow a job. The store is the same object each time; the number tells that it has changed.
 * @param {string} job
 * @returns {JobStore | null}
 */
export function useJob(job) {
  const [, redraw] = useState(0);
  const [store, setStore] = useState(/** @type {JobStore | null} */ (null));
  useEffect(() => {
    const opened = new JobStore(job, () => redraw((count) => count + 1));
    setStore(opened);
    opened.open();
    return () => opened.close();
  }, [job]);
  return store?.job === job ? store : null;
}

/**
 * Read something again and again while it is shown and the tab is seen.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {number} ms from the end of one reading to the next; 0: only once
 * @param {unknown[]} on what it depends
 * @returns {{data: T | null, problem: Error | null}}
 */
export function usePoll(load, ms, on) {
  const [found, setFound] = useState({ data: null, problem: null });
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const ending = new AbortController();
    let timer = 0;
    const round = async () => {
      if (!document.hidden) {
        try {
          const data = await latest.current(ending.signal);
          if (!ending.signal.aborted) setFound({ data, problem: null });
        } catch (problem) {
          if (!ending.signal.aborted) setFound((before) => ({ data: before.data, problem }));
        }
      }
      if (ms && !ending.signal.aborted) timer = setTimeout(round, ms);
    };
    round();
    return () => {
      ending.abort();
      clearTimeout(timer);
    };
  }, [ms, ...on]);
  return found;
}

/**
 * The service's time, so often: what is shown as *so long ago* moves by itself.
 * @param {number} [ms]
 */
export function useNow(ms = 1_000) {
  const [at, setAt] = useState(now());
  useEffect(() => {
    const timer = setInterval(() => setAt(now()), ms);
    return () => clearInterval(timer);
  }, [ms]);
  return at;
}

/** As in the style sheets. */
const PHONE = "(max-width: 44rem)";

/** @returns {boolean} if the view is as narrow as a phone, also after it was turned */
export function usePhone() {
  const [isPhone, setPhone] = useState(() => matchMedia(PHONE).matches);
  useEffect(() => {
    const width = matchMedia(PHONE);
    const follow = () => setPhone(width.matches);
    width.addEventListener("change", follow);
    follow();
    return () => width.removeEventListener("change", follow);
  }, []);
  return isPhone;
}
