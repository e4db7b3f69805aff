"""One page of HTML that holds its pictures and needs no network."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ..training import atomic_write

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ name }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 0.25em 0.9em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 13px; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p>{{ preset }}, {{ "{:,}".format(parameters) }} parameters{% if training %}, {{ training.step }} steps in
{{ "%.0f"|format(training.seconds) }} s{% endif %}. Relative errors of {{ samples }} test samples,
integrals with the quadrature weights of each mesh.</p>
<table>
<tr><th>mesh</th><th>points</th><th>weights</th>
<th>median</th><th>mean</th><th>worst</th><th>training mean</th></tr>
{% for row in rows %}
<tr><td>{{ row.mesh }}</td><td>{{ "{:,}".format(row.points) }}</td><td>{{ row.weights }}</td>
{% for key in ("median", "mean", "worst", "training_mean") %}
<td>{{ "%.2f"|format(100 * row[key]) }} %</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% if rollout %}
<h2>roll-out, from its own predictions</h2>
<table>
<tr><th>time</th><th>median</th><th>mean</th><th>worst</th></tr>
{% for row in rollout %}
<tr><td>{{ "%g"|format(row.time) }}</td>
{% for key in ("median", "mean", "worst") %}
<td>{{ "%.2f"|format(100 * row[key]) }} %</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% endif %}
{% for title, data in pictures %}
<h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/png;base64,{{ data }}">
{% endfor %}
{% if radii %}
<h2>learned radii 1 / sqrt(rate)</h2>
<table>
<tr><th>layer</th><th>by head</th></tr>
{% for layer, heads in radii.items() %}
<tr><td>{{ layer }}</td><td>{% for r in heads %}{{ "%.3g"|format(r) }} {% endfor %}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>configuration</h2>
<pre>{{ config }}</pre>
</body>
</html>
"""
_TITLES = {
    "resolution": "error by mesh",
    "samples": "test samples",
    "rollout": "error of the roll-out",
    "radii": "radii 1 / sqrt(rate) by layer and head",
    "attention": "attention of one point, by layer and head",
    "training": "training",
}


def write(path: Path, result: dict[str, Any], pictures: list[Path]) -> Path:
    """Write the page of an evaluation's result with these PNG files in it."""
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise ImportError('the report needs jinja2: pip install "continuum_ops[train]"') from error
    page = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    text = page.render(
        **{k: v for k, v in result.items() if k != "config"},
        preset=result["config"]["model"]["preset"],
        samples=result["config"]["data"]["test"],
        config=json.dumps(result["config"], indent=2),
        pictures=[(_TITLES[p.stem], base64.b64encode(p.read_bytes()).decode()) for p in pictures],
    )
    with atomic_write(path) as file:
        file.write(text.encode())
    return path
