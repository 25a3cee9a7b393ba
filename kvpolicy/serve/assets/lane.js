// One model, as a plan serves it: its conversation, and the panel of its tokens.

import { fill, h } from "./dom.js";
import { events } from "./events.js";
import { heldPanel } from "./held.js";

const PATH = "/v1/chat/completions";

export function lane(model) {
  const panel = heldPanel(model);
  const messages = [];

  /** Ask, and show the answer in an element as it comes. The question is forgotten if it fails. */
  async function answer(question, element, { key, signal, maxTokens, temperature }) {
    const said = h("p", { class: "said" });
    const cost = h("p", { class: "cost" });
    fill(element, h("h2", {}, model), said, cost);
    messages.push({ role: "user", content: question });
    const body = {
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      ...(maxTokens === null ? {} : { max_tokens: maxTokens }),
      ...(temperature === null ? {} : { temperature }),
      kvpolicy: { kept: true },
    };
    let text = "";
    const began = performance.now();
    try {
      for await (const event of events(PATH, body, key, signal)) {
        for (const choice of event.choices) text += choice.delta.content ?? "";
        if (event.choices.length) said.textContent = text;
        if (event.kvpolicy) panel.take(event.kvpolicy);
        if (event.usage) fill(cost, costOf(event.usage, performance.now() - began));
      }
      messages.push({ role: "assistant", content: text });
    } catch (error) {
      messages.pop();
      fill(cost, signal.aborted ? "Stopped." : text ? "The rest of the answer is missing." : "No answer.");
      if (!signal.aborted) throw error;
    }
  }

  return {
    model,
    panel,
    answer,
    clear() {
      messages.length = 0;
      panel.clear();
    },
  };
}

/** What an answer has cost, in one sentence. */
function costOf({ completion_tokens: tokens, kvpolicy: used }, ms) {
  const share = used.full_bytes ? used.peak_bytes / used.full_bytes : 1;
  return (
    `${tokens} tokens in ${(ms / 1000).toFixed(1)} s; at most ${used.peak_rows} rows in a layer; ` +
    `${bytes(used.peak_bytes)} of keys and values, ${Math.round(100 * share)} % of a full cache`
  );
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(number, 1)) / 10), units.length - 1);
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}
