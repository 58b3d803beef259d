"""The style sheet of a page, light and dark."""

STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfb;--card:#fff;--ink:#1a1d23;--muted:#5d6675;
--grid:#e3e6eb;--edge:#e3e6eb;--accent:#1f5fd0;--mark:#fff3d1;
--c0:#1f5fd0;--c1:#d9570a;--c2:#0a8f63;--c3:#8a3fd1;--c4:#cf2f4c;--c5:#0b87a3;--c6:#9a6b00;
--c7:#6b7280;
--good:#0a7a53;--warn:#9a5b00;--up:31,95,208;--down:224,104,12}
@media (prefers-color-scheme:dark){:root{--paper:#12151b;--card:#191d25;--ink:#e8ebf0;
--muted:#9aa5b5;--grid:#2b313c;--edge:#2b313c;--accent:#7fb0ff;--mark:#3d3416;
--c0:#6ea8ff;--c1:#ff9a55;--c2:#3fd39b;--c3:#c593ff;--c4:#ff7d92;--c5:#45cbe6;--c6:#e0b040;--c7:#9ca3af;
--good:#4fd6a0;--warn:#f0b95a;--up:84,150,255;--down:240,120,30}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 28px 80px}
h1{font-size:32px;line-height:1.15;letter-spacing:-.02em;margin:0 0 6px;font-weight:680}
h2{font-size:21px;letter-spacing:-.01em;margin:56px 0 6px;padding-top:18px;
border-top:1px solid var(--edge);font-weight:650}
h3{font-size:15px;margin:22px 0 6px;font-weight:650}
p{margin:6px 0 12px;max-width:72ch}
a{color:var(--accent)}
.faint,.about,figcaption,caption{color:var(--muted)}
.about{font-size:15px}
.eyebrow{font-size:12.5px;letter-spacing:.09em;text-transform:uppercase;color:var(--muted);
margin:0 0 8px}
.pill{display:inline-block;font-size:13px;font-weight:600;line-height:1;padding:5px 9px;
border-radius:99px;border:1px solid;vertical-align:middle;letter-spacing:0;white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(210px,100%),1fr));gap:12px;
margin:24px 0 8px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:13px 15px}
.card b{display:block;font-size:25px;line-height:1.2;font-weight:650;letter-spacing:-.01em;
font-variant-numeric:tabular-nums}
.card span{display:block;font-size:13px;color:var(--muted)}
.notes{background:var(--mark);border-radius:10px;padding:12px 18px;margin:20px 0;font-size:14.5px}
.notes ul{margin:4px 0 0;padding-left:20px}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));
gap:22px 26px;margin-top:12px}
.panels>.full{grid-column:1/-1}
figure{margin:0;min-width:0}
figcaption{font-size:13.5px;margin-bottom:4px}
figcaption b{color:var(--ink);font-weight:620}
svg.figure{display:block;overflow:visible;width:100%;height:auto;stroke-linejoin:round;font-family:inherit;
font-variant-numeric:tabular-nums}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:13.5px;color:var(--muted);
margin:10px 0 4px}
.legend span{white-space:nowrap;display:inline-flex;align-items:center;gap:7px}
.legend i{flex:none;display:inline-block;width:20px;height:0;border-top:2.5px solid}
.legend i.thin{border-top-width:1px;opacity:.7}
.legend i.area{height:11px;width:14px;border:0;border-radius:3px}
.legend i.band{height:11px;border:0;opacity:.25;border-radius:3px}
.legend i.dot{width:6px;height:6px;border:0;border-radius:9px;opacity:.6}
.legend i.dash{border-top:1.5px dashed}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14.5px;margin:10px 0 16px;
font-variant-numeric:tabular-nums}
caption{text-align:left;font-size:13.5px;padding:0 0 4px}
th{font-weight:600;font-size:13px;color:var(--muted);text-align:left;vertical-align:bottom}
th,td{padding:5px 17px 5px 0;border-bottom:1px solid var(--edge);white-space:nowrap}
.settings td{white-space:normal;overflow-wrap:anywhere}
td.num,th.num{text-align:right}
tr:last-child td{border-bottom:0}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:13.5px}
pre{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:13px 16px;
overflow-x:auto;line-height:1.7}
.settings{columns:2 400px;column-gap:44px}
.settings .wide{break-inside:avoid}
.settings table{width:100%;margin:0 0 20px}
.settings caption{color:var(--ink);font-weight:650}
.settings td:first-child{width:56%}
mark{background:var(--mark);color:inherit;border-radius:4px;padding:1px 5px}
.chip{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
.episode{display:block;max-width:min(100%,480px);min-width:min(100%,240px);border-radius:8px;
border:1px solid var(--edge)}
.tree{border:1px solid var(--edge);border-radius:10px;margin:4px 0 12px}
.tree svg{display:block;margin:0 auto}
@media (min-width:1140px){.tree{position:relative;left:50%;transform:translateX(-50%);
width:max-content;min-width:100%;max-width:95vw}}
.bar{vertical-align:middle;display:inline-flex;align-items:center;gap:8px;width:170px}
.bar i{display:block;height:9px;border-radius:3px;background:var(--c0);flex:none}
.dialogues{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(470px,100%),1fr));gap:16px;
margin:12px 0}
.dialogue{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 15px;
min-width:0}
.dialogue.full{grid-column:1/-1}
.of{font-size:13.5px;color:var(--muted);margin-bottom:6px}.of b{color:var(--ink);font-weight:620}
.turn{display:grid;grid-template-columns:52px 1fr;line-height:1.75;white-space:pre-wrap;
overflow-wrap:anywhere}
.who{font-size:12px;color:var(--muted);line-height:2.3}
.tok,.mark{border-radius:3px;padding:1px 0}
.mark{font-size:11.5px;color:var(--muted);margin:0 2px}
.up{background:rgba(var(--up),calc(var(--s,0)*.62))}
.down{background:rgba(var(--down),calc(var(--s,0)*.62))}
.turn .up,.turn .down{padding:2px 0}.turn .mark.up,.turn .mark.down{color:var(--ink)}
.turn sup{font-size:10px;color:var(--muted);margin-left:2px;line-height:0}
.legend i.swatch{height:13px;width:22px;border:1px solid var(--edge);border-radius:3px}
svg.values{display:block;max-width:none;height:auto;margin-top:8px;font-size:11px}
.values .rule{stroke:var(--grid);stroke-width:.7}.values .tick{stroke:var(--muted);stroke-width:.7}
.values text{fill:var(--muted)}.values text.own{fill:var(--ink);font-weight:600}
.values .own{fill:var(--muted);opacity:.09}
.values line.v{stroke:var(--ink);stroke-width:1.3;opacity:.75}.values circle.v{fill:var(--ink)}
.values .reward{stroke:var(--muted);stroke-width:.8;stroke-dasharray:2 3}
.values text.reward{stroke:none;fill:var(--ink)}
.values line.q{stroke-width:1.1}
.values .q.up{stroke:rgb(var(--up))}.values polygon.up{fill:rgb(var(--up))}
.values .q.down{stroke:rgb(var(--down))}.values polygon.down{fill:rgb(var(--down))}
.interval{vertical-align:middle}
.interval line{stroke:currentColor;stroke-width:2}.interval circle{fill:currentColor}
.interval line.level{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 2}
.missing{color:var(--muted);font-style:italic}
details{margin:12px 0}summary{cursor:pointer;color:var(--accent);font-size:14.5px}
footer{margin-top:56px;font-size:13px;color:var(--muted);border-top:1px solid var(--edge);
padding-top:14px}
@media print{main{max-width:none}h2{break-after:avoid}figure,.card{break-inside:avoid}}
"""
