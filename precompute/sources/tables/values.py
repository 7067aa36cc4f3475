"""Values of a table as SQL: the columns that each format has, as the same columns of rows.

The rows are the table ``loaded``: ``position`` from 0, ``name`` of the image (null without one), ``label`` (a number,
or text that may name a class), ``captions``, ``problem`` (null without one), ``height``, ``width``, ``companions``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..files.record import MAX_CAPTION_CHARS, MAX_CAPTIONS, MAX_CLASSES
from ..listing.duck import coalesced, identifier, literal
from .columns import Roles

SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))  # what ``str.strip`` removes
EDGES = r"^[\pZ\pC]|[\pZ\pC]$"  # text that may begin or end with some of them
CELL_LIST = "a list in a cell that is not JSON: write one row a caption, or a JSONL table with 'captions'"


@dataclass(frozen=True)
class Values:
    """How the values of a format are read, as SQL for one column.

    Args:
      text: text, null for anything else.
      label: a whole number or text, null without one.
      no_label: whether a value is no label.
      captions: a list of text.
      no_captions: what is wrong with captions, null if nothing is.
      number: a whole number.
    """

    text: Callable[[str], str]
    label: Callable[[str], str]
    no_label: Callable[[str], str]
    captions: Callable[[str], str]
    no_captions: Callable[[str], str]
    number: Callable[[str], str]


def _stripped(text: str) -> str:
    """As ``str.strip``; ``trim`` alone is ten times slower where nothing is to be removed."""
    return f"CASE WHEN regexp_matches({text}, '{EDGES}') THEN trim({text}, {literal(SPACES)}) ELSE {text} END"


def _cell(column: str) -> str:
    return f"nullif({_stripped(column)}, '')"


CELLS = Values(
    text=_cell,
    label=_cell,
    no_label=lambda column: "false",
    captions=lambda column: (
        f"""CASE WHEN {column} LIKE '%["%' AND trim({column}) LIKE '["%"]' AND json_valid({column})
        THEN json_extract_string({column}, '$[*]') WHEN {column} <> '' THEN [{column}] END"""
    ),
    no_captions=lambda column: (
        f"""CASE WHEN {column} LIKE '%[%]%' AND regexp_full_match(trim({column}), '(?s)\\[\\s*[''"].*[''"]\\s*\\]')
        AND NOT json_valid({column}) THEN {literal(CELL_LIST)} END"""
    ),
    number=lambda column: f"TRY_CAST({_cell(column)} AS BIGINT)",
)
JSON = Values(
    text=lambda column: f"CASE json_type({column}) WHEN 'VARCHAR' THEN nullif({column} ->> '$', '') END",
    label=lambda column: f"CASE WHEN json_type({column}) LIKE '%BIGINT' THEN TRY_CAST({column} ->> '$' AS BIGINT) END",
    no_label=lambda column: f"NOT json_type({column}) LIKE '%BIGINT' OR TRY_CAST({column} ->> '$' AS BIGINT) IS NULL",
    captions=lambda column: (
        f"""CASE json_type({column}) WHEN 'VARCHAR' THEN [{column} ->> '$']
        WHEN 'ARRAY' THEN json_extract_string({column}, '$[*]') END"""
    ),
    no_captions=lambda column: (
        f"""CASE WHEN json_type({column}) NOT IN ('VARCHAR', 'ARRAY')
        OR len([kind for kind in json_type({column}, '$[*]') if kind <> 'VARCHAR']) > 0
        THEN 'captions ' || left({column}::VARCHAR, 40) || ' are not text' END"""
    ),
    number=lambda column: f"CASE WHEN json_type({column}) LIKE '%BIGINT' THEN TRY_CAST({column} ->> '$' AS BIGINT) END",
)


def parquet_values(types: dict[str, str], *, has_class_names: bool = True) -> Values:
    """How columns of Parquet or Arrow are read.

    Args:
      types: in DuckDB, by quoted name.
      has_class_names: labels that are text name classes.
    """

    def is_text(column: str) -> bool:
        return types[column] in ("VARCHAR", '"NULL"') or types[column].startswith("ENUM")

    def is_list(column: str) -> bool:
        return bool(re.fullmatch(r"VARCHAR\[\d*\]", types[column]))

    def is_whole(column: str) -> bool:
        return bool(re.fullmatch(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?", types[column]))

    def number(column: str) -> str:
        return f"TRY_CAST({column} AS BIGINT)" if is_whole(column) else "NULL::BIGINT"

    return Values(
        text=lambda column: f"nullif({column}::VARCHAR, '')" if is_text(column) else "NULL::VARCHAR",
        label=lambda column: _cell(column) if has_class_names and is_text(column) else number(column),
        no_label=lambda column: (
            "false" if has_class_names and is_text(column) else f"{column} IS NOT NULL AND {number(column)} IS NULL"
        ),
        captions=lambda column: (
            f"CASE WHEN {column} IS NOT NULL THEN [{column}::VARCHAR] END"
            if is_text(column)
            else (f"{column}::VARCHAR[]" if is_list(column) else "NULL::VARCHAR[]")
        ),
        no_captions=lambda column: (
            "NULL"
            if is_text(column)
            else f"CASE WHEN {f'list_count({column}) < len({column})' if is_list(column) else f'{column} IS NOT NULL'} "
            f"THEN 'captions ' || left({column}::VARCHAR, 40) || ' are not text' END"
        ),
        number=number,
    )


COCO = parquet_values({'"file_name"': "VARCHAR", '"caption"': "VARCHAR", '"height"': "BIGINT", '"width"': "BIGINT"})


def row_columns(roles: Roles, values: Values, position: str) -> str:
    """The columns of ``loaded`` as SQL over the columns of a table.

    Args:
      position: number of the row, from 0, as SQL.
    """
    images, captions, labels = (
        [identifier(name) for name in names] for names in (roles.images, roles.captions, roles.labels)
    )
    texts = f"{coalesced(list(map(values.captions, captions)))}::VARCHAR[]"
    longest = f"list_max([length(text) for text in {texts}])"
    label, wrong_label = (
        coalesced(list(map(values.label, labels))),
        [
            f"CASE WHEN {values.no_label(name)} THEN 'label ' || left({name}::VARCHAR, 40) || "
            f"' is not a class index below {MAX_CLASSES}' END"
            for name in labels
        ],
    )
    problems = [
        *wrong_label,
        *map(values.no_captions, captions),
        f"CASE WHEN len({texts}) > {MAX_CAPTIONS} THEN len({texts}) || "
        f"' captions, at most {MAX_CAPTIONS} are taken' END",
        f"CASE WHEN {longest} > {MAX_CAPTION_CHARS} THEN 'a caption of ' || {longest} || "
        f"' characters, at most {MAX_CAPTION_CHARS} are taken' END",
    ]
    sides = [values.number(identifier(name)) for name in roles.sides] or ["NULL", "NULL"]
    beside = ", ".join(f"coalesce({values.text(identifier(name))}, '')" for name in roles.companions)
    return f"""
        {position} AS position, {coalesced(list(map(values.text, images)))} AS name, {label} AS label,
        coalesce([text for text in [{_stripped("text")} for text in {texts}] if text <> ''], []) AS captions,
        {coalesced(problems)} AS problem,
        {sides[0]}::BIGINT AS height, {sides[1]}::BIGINT AS width, [{beside}]::VARCHAR[] AS companions"""
