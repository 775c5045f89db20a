// Questions to the server. A newer question of the same page makes the older one give up.

export class ApiError extends Error {}

let leaving = new AbortController();

/** Give up all questions of the page that is left. */
export function leave() {
  leaving.abort();
  leaving = new AbortController();
}

/** The answer to a question: path below /api, and parameters (a list repeats its name). */
export async function ask(path, parameters = {}, signal = leaving.signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  let response;
  try {
    response = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("no answer: has `actors view` ended, or is the connection gone?");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(answer.error ?? `the server answers ${response.status}`);
  return answer;
}
