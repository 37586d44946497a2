"""The little grammar that generated captions need."""


def article(word: str) -> str:
    """`an` before a vowel, else `a` ("an orange", "a red")."""
    return "an" if word.lower().startswith(("a", "e", "i", "o", "u")) else "a"
