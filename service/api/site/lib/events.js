/**
 * A stream of server-sent events that comes back by itself.
 *
 * The browser's own EventSource cannot send a key, so the stream is read by `fetch`.
 */
import { Problem, send } from "./api.js";

/** The service says something at least every 15 s. Whoever is silent for longer is gone. */
const SILENCE_MS = 35_000;
const RETRY_MS = [100, 250, 500, 1_000];

/**
 * @typedef {object} Handlers
 * @property {(name: string, data: any) => void} event
 * @property {() => void} open
 * @property {(problem: Problem) => void} lost It will be tried again.
 * @property {(problem: Problem) => void} refused It will not.
 */

/**
 * Follow a stream until `signal` is aborted.
 * @param {string} path
 * @param {Handlers} handlers
 * @param {AbortSignal} signal
 */
export async function follow(path, handlers, signal) {
  const cursor = { id: "" };
  let failures = 0;
  while (!signal.aborted) {
    try {
      await once(path, cursor, handlers, signal, () => (failures = 0));
      throw new Problem(0, "The stream has ended", "The stream has ended.");
    } catch (error) {
      if (signal.aborted) return;
      const problem = error instanceof Problem ? error : new Problem(0, "Lost", String(error));
      if (!problem.passing) {
        handlers.refused(problem);
        return;
      }
      handlers.lost(problem);
    }
    await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
  }
}

async function once(path, cursor, handlers, signal, opened) {
  const attempt = new AbortController();
  const abort = () => attempt.abort();
  signal.addEventListener("abort", abort);
  let timer = setTimeout(abort, SILENCE_MS);
  try {
    const headers = cursor.id ? { "Last-Event-ID": cursor.id } : {};
    const response = await send(path, { headers, signal: attempt.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    opened();
    handlers.open();
    const parse = parser((event) => {
      if (event.id) cursor.id = event.id;
      if (event.data) handlers.event(event.name, JSON.parse(event.data));
    });
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(abort, SILENCE_MS);
      parse(value);
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", abort);
    attempt.abort();
  }
}

/**
 * Read the format of event streams, in whatever pieces it comes.
 * @param {(event: {name: string, id: string, data: string}) => void} emit
 * @returns {(piece: string) => void}
 */
export function parser(emit) {
  let rest = "";
  let event = { name: "message", id: "", data: "" };
  return (piece) => {
    const lines = (rest + piece).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "") {
        emit(event);
        event = { name: "message", id: "", data: "" };
      } else if (line.startsWith("data: ")) {
        event.data += line.slice(6);
      } else if (line.startsWith("event: ")) {
        event.name = line.slice(7);
      } else if (line.startsWith("id: ")) {
        event.id = line.slice(4);
      }
    }
  };
}

function pause(ms, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}
