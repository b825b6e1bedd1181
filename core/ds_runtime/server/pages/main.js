// The page: asks for the key if there is one, then fills the plan, the tiles and the chat.
import { chat } from "./chat.js";
import { watch } from "./live.js";

const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key");
let planned = null;

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// The model's name and the plan; false without the right key.
async function open() {
  const models = await fetch("v1/models", { headers: headers() });
  if (models.status === 401) return false;
  $("model").textContent = (await models.json()).data[0].id;
  const reply = await fetch("v1/plan", { headers: headers() });
  if (reply.ok) plan(await reply.json());
  return true;
}

function plan(found) {
  planned = found.digest;
  $("plan-head").textContent =
    `${found.platform} (${found.arch}) · ${found.dtype} · KV ${found.kv_layout}, pages of ` +
    `${found.page_size} · tp ${found.tp} · plan ${found.digest}`;
  $("rows").replaceChildren(...found.rows.map((row) => {
    const line = document.createElement("tr");
    const refused = row.refused.map(([name, why]) => `${name}: ${why}`).join("\n");
    for (const text of [row.op, row.kernel, row.provider, row.sites.join(", ")]) {
      line.appendChild(document.createElement("td")).textContent = text;
    }
    const why = line.appendChild(document.createElement("td"));
    if (refused) {
      const details = why.appendChild(document.createElement("details"));
      details.appendChild(document.createElement("summary")).textContent = `${row.refused.length} refused`;
      details.appendChild(document.createElement("div")).textContent = refused;
      details.lastChild.className = "note";
      details.lastChild.style.whiteSpace = "pre-line";
    }
    return line;
  }));
}

async function enter() {
  try {
    const known = await open();
    $("door").hidden = known;
    if (!known) $("key").focus();
    return known;
  } catch {
    return false; // the tiles say that nobody answers
  }
}

$("door").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = $("key").value;
  if (await enter()) sessionStorage.setItem("key", key);
  else $("door-said").textContent = "That is not the key of this server.";
});

let asking = false;
watch($("tiles"), async (up, said) => {
  $("state").textContent = up ? "serving" : said;
  $("state").dataset.state = up ? "good" : said === "starting" ? "wait" : "bad";
  if (!up) planned = null; // an engine that comes back may have another plan
  else if (planned === null && $("door").hidden && !asking) {
    asking = true;
    await enter();
    asking = false;
  }
});
chat(headers);
await enter();
