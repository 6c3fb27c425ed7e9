// Conversations in this browser's database: the turns, and a summary for the list. The store is
// bounded and can be full, because only the user deletes conversations.

const DATABASE = "saccade";
const MAX_BYTES = 64 << 20; // of a conversation
const MAX_CHATS = 200;
const MAX_WORDS = 20_000; // characters of a conversation that a search looks at
const FORGOTTEN = "saccade-forgotten";

/** The storage is full or unavailable; see the message. */
export class NotKept extends Error {}

/** {id, at, title, named, words, size} of each conversation, newest first. */
export async function heads() {
  try {
    await sweep(forgotten());
    const found = await run("readonly", ({ heads }) => heads.getAll());
    return found.sort((one, other) => other.at - one.at);
  } catch {
    return [];
  }
}

/** The turns of a conversation; empty if it is not saved. */
export async function load(id) {
  if (forgotten().includes(id)) return [];
  try {
    return (await next(() => run("readonly", ({ chats }) => chats.get(id))))?.turns ?? [];
  } catch {
    return [];
  }
}

let working = Promise.resolve();

/** Run operations one after the other, in order. */
function next(act) {
  const done = working.then(act);
  working = done.catch(() => {});
  return done;
}

/** Save the turns. title: set by the user. Throws NotKept. */
export function keep(id, turns, title = null) {
  return next(async () => {
    const head = headOf(id, turns);
    if (head.size > MAX_BYTES)
      throw new NotKept("This conversation is too large to save: export it before you leave.");
    await kept(async () => {
      const before = await run("readonly", ({ heads }) => heads.get(id));
      if (!before && (await run("readonly", ({ heads }) => heads.count())) >= MAX_CHATS)
        throw new NotKept(`The maximum of ${MAX_CHATS} conversations is saved: delete some.`);
      if (title ?? before?.named) Object.assign(head, { title: title ?? before.title, named: true });
      await run("readwrite", ({ heads, chats }) => (heads.put(head), chats.put({ id, turns })));
    });
  });
}

export function rename(id, title) {
  return next(() =>
    kept(async () => {
      const head = await run("readonly", ({ heads }) => heads.get(id));
      if (head) await run("readwrite", ({ heads }) => heads.put({ ...head, title, named: true }));
    }),
  );
}

/** From now on it is gone: a reload ends what the database has not yet done, and the next page
 * deletes what this one did not. */
export function forget(id) {
  try {
    localStorage.setItem(FORGOTTEN, JSON.stringify([...new Set([...forgotten(), id])]));
  } catch {
    // Also if the storage is full: only the database is updated.
  }
  return next(() => sweep([id])).catch(() => {});
}

/** The message for a storage error. */
async function kept(act) {
  try {
    await act();
  } catch (error) {
    if (error instanceof NotKept) throw error;
    throw new NotKept(
      error?.name === "QuotaExceededError"
        ? "The browser's storage is full, so this conversation is not saved: delete others, or " +
          "export it before you leave."
        : "This browser does not save conversations here: export this one before you leave.",
    );
  }
}

/** The summary of a conversation for the list. */
export function headOf(id, turns) {
  const words = turns.map(({ text }) => text).join("\n");
  const title = turns[0]?.text || turns[0]?.images[0]?.name || "Untitled";
  return {
    id,
    at: Date.now(),
    title: title.slice(0, 400).replace(/\s+/g, " ").trim().slice(0, 80),
    named: false,
    words: words.slice(0, MAX_WORDS).toLowerCase(),
    size: turns.reduce((sum, turn) => sum + size(turn), 0),
  };
}

const size = ({ text, images }) =>
  2 * text.length +
  images.reduce(
    (sum, { url, thumbnail, file, frames = [] }) =>
      frames.reduce((all, frame) => all + frame.length, sum) +
      (url?.length ?? 0) + (thumbnail?.length ?? 0) + (file?.size ?? 0),
    0,
  );

function forgotten() {
  try {
    return JSON.parse(localStorage.getItem(FORGOTTEN)) ?? [];
  } catch {
    return [];
  }
}

async function sweep(ids) {
  for (const id of ids)
    await run("readwrite", ({ heads, chats }) => (heads.delete(id), chats.delete(id)));
  if (ids.length)
    localStorage.setItem(FORGOTTEN, JSON.stringify(forgotten().filter((id) => !ids.includes(id))));
}

/** The result of a request in its own transaction. */
async function run(mode, act) {
  const database = await opened();
  try {
    const transaction = database.transaction(["heads", "chats"], mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const [heads, chats] = ["heads", "chats"].map((name) => transaction.objectStore(name));
    const found = act({ heads, chats });
    await done;
    return found.result;
  } finally {
    database.close();
  }
}

function opened() {
  const request = indexedDB.open(DATABASE, 2);
  request.onupgradeneeded = ({ oldVersion }) => {
    const heads = request.result.createObjectStore("heads", { keyPath: "id" });
    if (!oldVersion) request.result.createObjectStore("chats", { keyPath: "id" });
    else listOld(request.transaction.objectStore("chats"), heads);
  };
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** The first version had no heads. */
function listOld(chats, heads) {
  chats.openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const { id, at, turns } = cursor.value;
    if (turns.length) heads.put({ ...headOf(id, turns), at });
    cursor.continue();
  };
}
