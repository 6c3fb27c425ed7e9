// The conversation over a reload: kept in this browser, by tab, until it is cleared. Bounded: of few
// tabs, and none above a size. Where the browser keeps nothing (a private window), neither does it.

const [DATABASE, STORE] = ["saccade", "chats"];
const MOST_BYTES = 64 << 20;
const MOST_CHATS = 6;
const TAB = "saccade-tab";

/** What is kept of this tab: turns, or none. */
export async function load() {
  try {
    const found = await run("readonly", (chats) => chats.get(tab()));
    return found?.turns ?? [];
  } catch {
    return [];
  }
}

let saving = Promise.resolve();

/** Keep the turns, in place of what was kept, one call after the other; whether that was done. */
export function save(turns) {
  return (saving = saving.then(() => put(turns)));
}

async function put(turns) {
  try {
    const fits = turns.reduce((sum, turn) => sum + size(turn), 0) <= MOST_BYTES;
    if (!turns.length || !fits) await run("readwrite", (chats) => chats.delete(tab()));
    else {
      await run("readwrite", (chats) => chats.put({ id: tab(), at: Date.now(), turns }));
      await forgetOld();
    }
    return fits;
  } catch {
    return false;
  }
}

const size = ({ text, images }) =>
  2 * text.length + images.reduce((sum, { url, thumbnail }) => sum + url.length + (thumbnail?.length ?? 0), 0);

async function forgetOld() {
  const kept = await run("readonly", (chats) => chats.index("at").getAllKeys());
  for (const id of kept.slice(0, -MOST_CHATS)) await run("readwrite", (chats) => chats.delete(id));
}

function tab() {
  let id = sessionStorage.getItem(TAB);
  if (!id) {
    id = [...crypto.getRandomValues(new Uint8Array(8))].join("-");
    sessionStorage.setItem(TAB, id);
  }
  return id;
}

async function run(mode, act) {
  const database = await opened();
  try {
    return await settled(act(database.transaction(STORE, mode).objectStore(STORE)));
  } finally {
    database.close();
  }
}

function opened() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () =>
    request.result.createObjectStore(STORE, { keyPath: "id" }).createIndex("at", "at");
  return settled(request);
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
