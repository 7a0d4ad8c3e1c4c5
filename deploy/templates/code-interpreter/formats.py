"""Inside a Python kernel: figures and tables also as data. Loaded by `kernels.py` before anything of the user's runs."""

from __future__ import annotations

import json
from typing import Any

from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode


class _Formatter(BaseFormatter):  # type: ignore[misc]
    """One more kind of content for one class of objects, known by its name: no library is imported before the user does.

    Asked for by no table of types: matplotlib's own integration takes figures out of the tables of all formatters.
    """

    _return_type = dict
    of = ("", "")

    def __call__(self, obj: Any) -> dict[str, Any] | None:
        # Unlike for pictures, what cannot be read is no error: the object is shown all the same.
        try:
            known = any(one.__name__ == self.of[1] and one.__module__.partition(".")[0] == self.of[0] for one in type(obj).__mro__)
            return self.read(obj) if known else None
        except Exception:  # noqa: BLE001
            return None

    def read(self, obj: Any) -> dict[str, Any] | None:
        """The object, as JSON has it."""
        raise NotImplementedError


class DataFormatter(_Formatter):
    """A table's columns, as lists of what JSON has; times as ISO 8601."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    of = ("pandas", "DataFrame")

    def read(self, obj: Any) -> dict[str, Any]:
        """See columns."""
        return columns(obj)


class ChartFormatter(_Formatter):
    """What a figure shows, as numbers and names."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    of = ("matplotlib", "Figure")

    def read(self, obj: Any) -> dict[str, Any] | None:
        """See chart."""
        return chart(obj)


def columns(frame: Any) -> dict[str, Any]:
    """Of a pandas DataFrame: name to values."""
    split = json.loads(frame.to_json(orient="split", date_format="iso", default_handler=str))
    return {str(name): [row[at] for row in split["data"]] for at, name in enumerate(split["columns"])}


def chart(figure: Any) -> dict[str, Any] | None:
    """Of a matplotlib Figure, in the SDK's form; None for an empty one."""
    from e2b_charts import chart_figure_to_dict

    # Through JSON, since numpy's numbers and enumerations are none of its kinds.
    found = chart_figure_to_dict(figure)
    return json.loads(json.dumps(found, default=_plain)) if found else None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def load(shell: Any) -> None:
    """Teach a shell both kinds."""
    formatters = shell.display_formatter.formatters
    data, charts = DataFormatter(parent=shell.display_formatter), ChartFormatter(parent=shell.display_formatter)
    formatters[data.format_type], formatters[charts.format_type] = data, charts
