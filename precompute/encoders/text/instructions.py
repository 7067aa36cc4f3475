"""The instruction that Sana prepends to a caption, so that a language model reads it as a prompt to enhance.

Sana trains with one text and diffusers samples with another: Sana's configuration has literal backslashes before the
quotation marks, diffusers has apostrophes. So a store records its text. Source: Xie et al. 2024, "SANA", section 3.2
(complex human instruction).
"""

from __future__ import annotations

_LINES = (
    r"Given a user prompt, generate an \"Enhanced prompt\" that provides detailed visual descriptions suitable for "
    "image generation. Evaluate the level of detail in the user prompt:",
    "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
    "relationships to create vivid and concrete scenes.",
    "- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.",
    "Here are examples of how to transform or refine prompts:",
    "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
    "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
    "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
    "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
    "skyscrapers.",
    "Please generate only the enhanced description for the prompt below and avoid including any additional commentary "
    "or evaluations:",
    "User Prompt: ",
)
SANA = "\n".join(_LINES)
INSTRUCTIONS = {"sana": SANA, "sana-diffusers": SANA.replace(r"\"", "'")}


def instruction_text(name: str) -> str:
    """The text of a named instruction; any other text as it is."""
    return INSTRUCTIONS.get(name, name)
