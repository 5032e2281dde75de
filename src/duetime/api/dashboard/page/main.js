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
import { beginTable, beginWaiting, showWaiting } from "./waiting.js";

let lastMs = 0;

beginToken();
beginTiles({
  waiting: () => listWaiting({}),
  late: () => listWaiting({ toMs: lastMs }),
  failed: () => listWaiting({ failed: true }),
  rejected: () => openSection("rejected"),
  rescued: () => openSection("rescued"),
  dead: () => openSection("dead"),
});
beginWaiting((fromMs, toMs) => listWaiting({ fromMs, toMs }));
beginTable();
beginMessages();
beginRecurring();
beginDead();
beginRescued();

follow({
  look(seen) {
    lastMs = seen.at_ms;
    showConnection("live", "Live");
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
