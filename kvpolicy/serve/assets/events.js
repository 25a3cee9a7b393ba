// Requests to this server: JSON, and the server-sent events of a stream.

/** JSON of a path. Throws an Error with the sentence of the server if it refuses. */
export async function ask(path, key) {
  const answer = await reached(fetch(path, { headers: headersOf(key) }));
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

/** The events of a POST as objects, until [DONE]. Throws as `ask`, also if the stream breaks. */
export async function* events(path, body, key, signal) {
  const headers = { ...headersOf(key), "Content-Type": "application/json" };
  const answer = await reached(fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Error("The connection has ended before the answer.");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** What a promise gives; a connection that cannot be made, or breaks, is said in words of ours. */
function reached(promise) {
  return promise.catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached, or has ended; see whether it runs.");
  });
}

function headersOf(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function refusal(answer) {
  const body = await answer.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? `The server has answered ${answer.status}.`);
  error.status = answer.status;
  return error;
}
