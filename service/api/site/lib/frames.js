/** Work that is done at most once for each picture that the browser draws, however often it is asked for. */

/**
 * @param {() => void} work
 * @returns {(() => void) & {cancel: () => void}}
 */
export function oncePerFrame(work) {
  let asked = 0;
  const ask = () => {
    if (asked) return;
    asked = requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
  ask.cancel = () => {
    cancelAnimationFrame(asked);
    asked = 0;
  };
  return ask;
}

/**
 * Like the above, but with at least so long from one time to the next, for what costs a request.
 * @param {() => void} work
 * @param {number} ms
 */
export function atMostEvery(ms, work) {
  let timer = 0;
  let last = -Infinity;
  const ask = () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      last = performance.now();
      work();
    }, Math.max(0, last + ms - performance.now()));
  };
  ask.cancel = () => {
    clearTimeout(timer);
    timer = 0;
  };
  return ask;
}
