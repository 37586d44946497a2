"""Zero-shot evaluation; `openclip_linattn.zeroshot.evaluate.evaluate` is the way in."""
