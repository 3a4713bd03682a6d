/** The HTTP API, with the key of whoever looks. */

const KEY = "tidegauge.key";

/** An answer that is an error (RFC 9457), or none at all (status 0). */
export class Problem extends Error {
  /** @param {number} status @param {string} title @param {string} detail */
  constructor(status, title, detail) {
    super(detail || title);
    this.status = status;
    this.title = title;
  }

  /** Whether the same request may succeed in a moment. */
  get passing() {
    return this.status === 0 || this.status === 503 || this.status === 429 || this.status >= 500;
  }
}

export const key = {
  /** It ends with the tab: whoever comes after us finds nothing. */
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (secret) => sessionStorage.setItem(KEY, secret),
  clear: () => sessionStorage.removeItem(KEY),
};

/** How far the service's clock is ahead of this machine's. */
let skewMs = 0;

/** Now, by the service's clock. */
export const now = () => Date.now() + skewMs;

/** @param {number} serviceMs @param {number} sentMs @param {number} gotMs */
export function setClock(serviceMs, sentMs, gotMs) {
  skewMs = serviceMs - (sentMs + gotMs) / 2;
}

/** @type {(problem: Problem) => void} */
let onRefused = () => {};

/** Call this when a key is needed, or no longer good. */
export function whenRefused(call) {
  onRefused = call;
}

/**
 * Send a request. Throws `Problem`, or the signal's own error once it is aborted.
 * @param {string} path
 * @param {{signal?: AbortSignal, method?: string, headers?: Record<string, string>, secret?: string}} [options]
 * @returns {Promise<Response>}
 */
export async function send(path, { signal, method = "GET", headers = {}, body, secret = key.get() } = {}) {
  const all = { ...headers };
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (secret) all.Authorization = `Bearer ${secret}`;
  let response;
  try {
    // Relative to the page, so that it may be served below any path.
    response = await fetch(path.replace(/^\//, ""), {
      method, headers: all, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem(0, "The service does not answer", "The service does not answer.");
  }
  if (response.ok) return response;
  const problem = await readProblem(response);
  if (problem.status === 401) onRefused(problem);
  throw problem;
}

async function readProblem(response) {
  try {
    const body = await response.json();
    return new Problem(response.status, body.title ?? "", body.detail ?? "");
  } catch {
    return new Problem(response.status, response.statusText, "");
  }
}

/** @param {string} path @param {Parameters<typeof send>[1]} [options] */
export async function read(path, options) {
  return (await send(path, options)).json();
}

/** @param {string} job @param {string} [stage] */
export function pathOf(job, stage) {
  const path = `/v1/jobs/${encodeURIComponent(job)}`;
  return stage === undefined ? path : `${path}/stages/${encodeURIComponent(stage)}`;
}

/**
 * @typedef {{name: string | null, role: string, jobs: string, now: number}} Me
 * @returns {Promise<Me>}
 */
export async function whoAmI(secret = key.get()) {
  const sent = Date.now();
  const me = await read("/v1/whoami", { secret });
  setClock(me.now, sent, Date.now());
  return me;
}
