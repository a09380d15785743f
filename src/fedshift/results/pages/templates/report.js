// Wires the page: what is chosen on the side is the state, and everything is drawn from it.

(() => {
  const { byId, fill } = page;
  const data = page.data();
  const { views, table } = data;
  const state = { rule: views.rules[0].key, measure: views.measures[0].key, part: "client_mean", stream: 0, words: [] };
  const text = views.rows.map((row) => [row.name, row.method, row.adapter, ...row.point].join(" ").toLowerCase());
  state.rows = () => views.rows.map((_, row) => row).filter((row) => state.words.every((word) => text[row].includes(word)));

  const shown = scoreTable(data, state);
  const drawn = charts(data, state);

  page.options(byId("measure"), views.measures.map((one) => [one.key, one.title]));
  page.options(byId("rule"), views.rules.map((one) => [one.key, one.title]));
  page.options(byId("part"), table.parts.map((one) => [one.key, one.title]));
  page.options(byId("stream"), views.columns.map((column, k) => [k, column.title]));

  // The table at once; pictures one after the other while nothing else is to be done, once plotly's script, which is far
  // longer than ours, has been read. A newer wish ends an older one.
  let wish = 0;
  const whenIdle = window.requestIdleCallback || ((work) => setTimeout(work, 1));
  const all = () => {
    const mine = ++wish;
    document.documentElement.dataset.ready = "no";
    shown.draw();
    const count = state.rows().length;
    fill(byId("shown"), count === views.rows.length ? `${count} rows` : `${count} of ${views.rows.length} rows`);
    const queue = Object.values(drawn);
    const next = () => {
      if (mine !== wish) return;
      const picture = queue.shift();
      if (!picture) { document.documentElement.dataset.ready = "yes"; return; }
      picture();
      whenIdle(next, { timeout: 200 });
    };
    if (window.Plotly) whenIdle(next, { timeout: 200 });
    else addEventListener("load", () => whenIdle(next, { timeout: 200 }), { once: true });
  };

  const choose = (key, of) => byId(key).addEventListener("input", () => { state[key] = of(byId(key).value); all(); });
  choose("measure", String);
  choose("rule", String);
  choose("part", String);
  choose("stream", Number);
  byId("filter").addEventListener("input", () => { state.words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean); all(); });

  page.theme(byId("theme"), all);

  // Which section one is in.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-10% 0px -75% 0px" });
  for (const key of links.keys()) if (byId(key)) seen.observe(byId(key));

  page.onPaper(() => { wish += 1; shown.draw(); for (const picture of Object.values(drawn)) picture(); });

  // On paper everything is open.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) { details.open = true; details.dataset.closed = "yes"; }
  });
  addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) { details.open = false; delete details.dataset.closed; }
  });
})();
