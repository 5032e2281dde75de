// The page, put together: what comes by itself, and what somebody asks for.

import { beginDead, openSection } from "./dead.js";
import { follow } from "./events.js";
import { showLateness } from "./lateness.js";
import { beginMessages, listWaiting } from "./messages.js";
import { beginRecurring } from "./recurring.js";
import { beginRescued } from "./rescued.js";
import { asOf, beginTiles, showConnection, showSpooled, showTiles } from "./tiles.js";
import { beginToken } from "./token.js";
import { showTraffic } from "./traffic.js";
import { beginWaiting, showWaiting } from "./waiting.js";

let lastMs = 0;

beginToken();
beginTiles({
  waiting: () => listWaiting({}),
  // Before the first look, the browser's clock has to do.
  late: () => listWaiting({ toMs: lastMs || Date.now() }),
  failed: () => listWaiting({ failed: true }),
  rejected: () => openSection("rejected"),
  rescued: () => openSection("rescued"),
  dead: () => openSection("dead"),
});
beginWaiting((fromMs, toMs) => listWaiting({ fromMs, toMs }));
beginMessages();
beginRecurring();
beginDead();
beginRescued();

follow({
  look(seen) {
    lastMs = seen.at_ms;
    if (seen.store_trouble) showConnection("trouble", seen.store_trouble, false);
    else showConnection("live", "Live");
    showTiles(seen, showTraffic(seen));
    showLateness(seen);
    showWaiting(seen);
  },
  trouble({ problem, spooled }) {
    showSpooled(spooled);
    showConnection("trouble", `${problem.detail}${asOf(lastMs)}`);
  },
  lost() {
    showConnection("lost", `The connection is lost; trying again.${asOf(lastMs)}`);
  },
});
