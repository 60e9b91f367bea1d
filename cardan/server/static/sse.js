// Server-sent events over fetch: EventSource can send neither a key nor a body.

/** Events of a response as `{event, data}`; comments are left out. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (text + value).split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event.data !== "") yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

function parse(block) {
  const event = { event: "message", data: "" };
  const lines = [];
  for (const line of block.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.slice(0, colon) === "data") lines.push(value);
    else if (line.slice(0, colon) === "event") event.event = value;
  }
  event.data = lines.join("\n");
  return event;
}
