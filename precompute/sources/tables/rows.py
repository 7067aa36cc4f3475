"""Rows of any table as SQL: each format gives its cells as JSON, and one projection turns them into the same rows.

The rows are the table ``loaded``: ``position`` from 0, ``name`` of the image (null without one), ``label`` (a class
index or the name of a class, as text), ``label_is_number`` (the table has it as a number, not as text),
``label_problem`` (why there is none, null without one), ``captions``, ``problem`` (null without one), ``height``,
``width``, ``companions``, ``split`` (null without one).
"""

from __future__ import annotations

from ..files.labels import MAX_CLASSES, MAX_LABEL_CHARS
from ..files.record import MAX_CAPTION_CHARS, MAX_CAPTIONS, NUL_IN_CAPTION
from ..listing.duck import coalesced, identifier, literal
from .columns import Roles

POSITION = '"leandit position"'  # column with the number of a row, beside the columns of the table
SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))  # what ``str.strip`` removes
EDGES = r"^[\pZ\pC]|[\pZ\pC]$"  # text that may begin or end with some of them
LIST_AS_TEXT = "a list in a cell that is not JSON: write one row a caption, or a JSONL table with 'captions'"


def stripped(text: str) -> str:
    """Strip white space as ``str.strip`` does; ``trim`` alone is ten times slower where nothing is to be removed."""
    return f"CASE WHEN regexp_matches({text}, '{EDGES}') THEN trim({text}, {literal(SPACES)}) ELSE {text} END"


def text_cell(column: str) -> str:
    """A cell of a text table as JSON: a JSON list of texts stays one; an empty cell is null."""
    return f"""CASE WHEN {column} LIKE '%["%' AND trim({column}) LIKE '["%"]' AND json_valid({column})
        THEN {column}::JSON ELSE to_json(nullif({stripped(column)}, '')) END"""


def typed_cell(column: str, kind: str) -> str:
    """A column of Parquet or Arrow as JSON.

    Args:
      kind: its type in DuckDB.
    """
    if kind == "BLOB":  # its text if it is UTF-8, as some programs write text; else no text, and no value of a column
        as_text = f"to_json(TRY(decode({column})))"
        return (
            f"CASE WHEN {column} IS NOT NULL THEN coalesce({as_text}, json_object('BLOB', octet_length({column}))) END"
        )
    if kind in ("FLOAT", "DOUBLE"):  # NaN is no JSON; pandas writes it for a missing value
        return f"CASE WHEN isfinite({column}) THEN to_json({column}) END"
    return f"to_json({column})"


def row_columns(roles: Roles) -> str:
    """The columns of ``loaded`` as SQL over POSITION and the cells of a table as JSON."""
    captions = list(map(identifier, roles.captions))
    labels, are_numbers, label_problems = [], [], []
    for cell in map(identifier, roles.labels):
        number = f"TRY_CAST({cell} ->> '$' AS DOUBLE)"
        is_index = (
            f"(json_type({cell}) LIKE '%BIGINT' OR json_type({cell}) = 'DOUBLE') AND {number} = floor({number}) "
            f"AND {number} BETWEEN -1 AND {MAX_CLASSES - 1}"
        )
        unstripped = f"({cell} ->> '$')"
        text = f"nullif({stripped(unstripped)}, '')"
        is_text = f"json_type({cell}) = 'VARCHAR' AND length({cell} ->> '$') <= {MAX_LABEL_CHARS}"
        labels.append(f"CASE WHEN {is_index} THEN {number}::BIGINT::VARCHAR WHEN {is_text} THEN {text} END")
        are_numbers.append(f"CASE WHEN {is_index} THEN true WHEN {is_text} AND {text} IS NOT NULL THEN false END")
        label_problems.append(
            f"CASE WHEN json_type({cell}) IS NOT NULL AND NOT ({is_index}) AND NOT ({is_text}) "
            f"THEN 'label ' || left({cell}::VARCHAR, 40) || ' is not a class index below {MAX_CLASSES}' END"
        )
    texts = f"{coalesced([_texts(cell) for cell in captions])}::VARCHAR[]"
    longest = f"list_max([length(text) for text in {texts}])"
    problems = [
        *map(_problem_of_captions, captions),
        f"CASE WHEN len({texts}) > {MAX_CAPTIONS} THEN len({texts}) || "
        f"' captions, at most {MAX_CAPTIONS} are allowed' END",
        f"CASE WHEN {longest} > {MAX_CAPTION_CHARS} THEN 'a caption of ' || {longest} || "
        f"' characters, at most {MAX_CAPTION_CHARS} are allowed' END",
    ]
    sides = [f"TRY_CAST({identifier(name)} ->> '$' AS BIGINT)" for name in roles.sides] or ["NULL::BIGINT"] * 2
    names = coalesced([_text(identifier(name)) for name in roles.images])
    companions = ", ".join(f"coalesce({_text(identifier(name))}, '')" for name in roles.companions)
    split = f"{_text(identifier(roles.split))}::VARCHAR" if roles.split else "NULL::VARCHAR"
    return f"""
        {POSITION} AS position, {names}::VARCHAR AS name,
        {coalesced(labels)}::VARCHAR AS label, {coalesced(are_numbers)}::BOOLEAN AS label_is_number,
        {coalesced(label_problems)}::VARCHAR AS label_problem,
        coalesce([text for text in [{stripped("text")} for text in {texts}] if text <> ''], []) AS captions,
        {coalesced(problems)}::VARCHAR AS problem, {sides[0]} AS height, {sides[1]} AS width,
        [{companions}]::VARCHAR[] AS companions, {split} AS split"""


def _text(cell: str) -> str:
    return f"CASE json_type({cell}) WHEN 'VARCHAR' THEN nullif({cell} ->> '$', '') END"


def _texts(cell: str) -> str:
    """The captions of a cell; null if it has none, so that the next column of captions counts."""
    texts = f"""CASE json_type({cell}) WHEN 'VARCHAR' THEN [{cell} ->> '$']
        WHEN 'ARRAY' THEN json_extract_string({cell}, '$[*]') END"""
    return f"""CASE WHEN len([text for text in {texts} if {stripped("text")} <> '']) > 0 THEN {texts} END"""


def _problem_of_captions(cell: str) -> str:
    return f"""CASE WHEN json_type({cell}) NOT IN ('VARCHAR', 'ARRAY')
        OR len([kind for kind in json_type({cell}, '$[*]') if kind <> 'VARCHAR']) > 0
        THEN 'captions ' || left({cell}::VARCHAR, 40) || ' are not text'
        WHEN len([text for text in {_texts(cell)} if contains(text, chr(0))]) > 0 THEN {literal(NUL_IN_CAPTION)}
        WHEN json_type({cell}) = 'VARCHAR' AND {cell} ->> '$' LIKE '[%]'
        AND regexp_full_match({cell} ->> '$', '(?s)\\[\\s*[''"].*[''"]\\s*\\]') THEN {literal(LIST_AS_TEXT)} END"""
