// Asks the server; paths are relative to the page's secret address.

/** The answer to a question; throws an Error with the server's reason. */
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null) query.append(name, one);
  }
  const text = query.toString();
  let reply;
  try {
    reply = await fetch(`api/${path}${text ? `?${text}` : ""}`);
  } catch {
    throw new Error("The view's process does not answer: the run has ended, or it was stopped.");
  }
  const body = reply.headers.get("content-type")?.startsWith("application/json") ? await reply.json() : null;
  if (!reply.ok) throw new Error(body?.error ?? `The view's process answered ${reply.status}.`);
  return body;
}
