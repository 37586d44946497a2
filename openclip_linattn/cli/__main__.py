"""`python -m openclip_linattn.cli`, the same as the command `openclip-linattn`."""

from openclip_linattn.cli import main

main()
