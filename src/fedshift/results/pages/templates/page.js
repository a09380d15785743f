"use strict";
// What every page of ours shares: elements made of text alone, the theme, and how rows look in pictures.

const page = (() => {
  const byId = (id) => document.getElementById(id);

  // An element; children are elements or text. Nothing here ever reads text as HTML.
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false || value === "") continue;
      if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
      else if (key === "style") Object.assign(element.style, value);
      else element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  const fill = (element, ...children) => element.replaceChildren(...children);

  // The options of a select; it keeps its choice if that is still there.
  const options = (select, entries) => {
    const before = select.value;
    const there = [...select.options].map((option) => [option.value, option.text]);
    if (JSON.stringify(there) === JSON.stringify(entries.map(([value, text]) => [String(value), text]))) return; // an open list stays open
    fill(select, ...entries.map(([value, text]) => make("option", { value }, text)));
    if (entries.some(([value]) => String(value) === before)) select.value = before;
  };

  const data = () => JSON.parse(byId("data").textContent);

  const remembered = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
  const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* a file may not be allowed to */ } };

  // Light or dark: as the system has it, until somebody chooses; pictures are drawn anew.
  const theme = (button, redraw) => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const current = () => document.documentElement.dataset.theme;
    const set = (name) => {
      document.documentElement.dataset.theme = name;
      button.textContent = name === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", `Change to ${name === "dark" ? "light" : "dark"} colours`);
      redraw();
    };
    button.addEventListener("click", () => {
      const next = current() === "dark" ? "light" : "dark";
      remember("fedshift-theme", next);
      set(next);
    });
    system.addEventListener("change", () => { if (!remembered("fedshift-theme")) set(system.matches ? "dark" : "light"); });
    set(remembered("fedshift-theme") || (system.matches ? "dark" : "light"));
  };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const HUES = 10;
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down", "bowtie"]; // not as many as hues: a colour comes back with another symbol
  const FORMS = ["", "-open", "-dot", "-open-dot"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  // A method has a colour and a symbol, its adapters fill the symbol in their own way: nobody needs colours to tell rows apart.
  const look = (hue, mark = 0) => ({
    colour: colour(`s${hue % HUES}`),
    symbol: SYMBOLS[hue % SYMBOLS.length] + FORMS[mark % FORMS.length],
    dash: DASHES[(Math.floor(hue / HUES) + mark) % DASHES.length],
  });

  // Plotly reads some tags in text: names are shown as they are.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  const faded = (hex, opacity) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  };

  const layout = (more = {}) => {
    const axis = { gridcolor: colour("grid"), zeroline: false, linecolor: colour("line"), automargin: true, tickfont: { size: 12 } };
    const { xaxis = {}, yaxis = {}, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 10, r: 14, t: 12, b: 10 }, height: 400,
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink"), size: 13 }, align: "left" },
      hovermode: "closest", dragmode: false,
      showlegend: false, ...(printing ? { width: PAPER } : {}),
      xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  };

  const GLYPHS = {
    circle: "●", square: "■", diamond: "◆", "triangle-up": "▲", cross: "✚", star: "★", hexagon: "⬢", "triangle-down": "▼", bowtie: "⧓",
    "circle-open": "○", "square-open": "□", "diamond-open": "◇", "triangle-up-open": "△", "cross-open": "✛", "star-open": "☆", "hexagon-open": "⬡", "triangle-down-open": "▽", "bowtie-open": "⋈",
  };
  const glyph = (trace) => {
    const symbol = trace.marker && [trace.marker.symbol].flat()[0];
    return symbol && !(trace.mode === "lines") ? GLYPHS[symbol.replace("-dot", "")] || "●" : "━";
  };

  // The names below a picture: buttons, so that a keyboard can switch a line off and on as well.
  const keys = (element, traces) => {
    const named = traces.map((trace, k) => [trace, k]).filter(([trace]) => trace.name && trace.showlegend !== false);
    const buttons = named.map(([trace]) => {
      const mine = traces.flatMap((other, k) => (other === trace || (trace.legendgroup && other.legendgroup === trace.legendgroup) ? [k] : []));
      const ink = (trace.marker && [trace.marker.color].flat()[0]) || trace.line.color;
      const on = trace.visible !== "legendonly";
      const button = make("button", { type: "button", class: "key", "aria-pressed": String(on) }, make("span", { "aria-hidden": "true", style: { color: ink } }, glyph(trace)), trace.title);
      button.addEventListener("click", () => {
        const next = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(next));
        Plotly.restyle(element, { visible: next ? true : "legendonly" }, mine);
      });
      return button;
    });
    const box = element.parentElement.querySelector(".keys") || element.parentElement.appendChild(make("div", { class: "keys", role: "group", "aria-label": "What the picture shows" }));
    fill(box, ...(buttons.length > 1 ? buttons : []));
  };

  // Traces have a ``title``, a name as it is; plotly is given it escaped.
  const draw = (id, traces, more) => {
    const element = byId(id);
    if (!element) return;
    const named = traces.map((trace) => (trace.title === undefined ? trace : { ...trace, name: plain(trace.title) }));
    const config = { responsive: true, displayModeBar: false, displaylogo: false, scrollZoom: false, doubleClick: false };
    Plotly.react(element, named.map(({ title, ...trace }) => trace), layout(more), config);
    keys(element, named);
  };

  // Paper has its own width, and everything on it is light and drawn before it is printed.
  let printing = false;
  const PAPER = 690;
  const onPaper = (redraw) => {
    let before = "";
    addEventListener("beforeprint", () => {
      before = document.documentElement.dataset.theme;
      document.documentElement.dataset.theme = "light";
      printing = true;
      redraw();
    });
    addEventListener("afterprint", () => {
      document.documentElement.dataset.theme = before;
      printing = false;
      redraw();
    });
  };

  return { byId, make, fill, options, data, theme, colour, look, plain, faded, draw, onPaper, SYMBOLS, HUES };
})();
