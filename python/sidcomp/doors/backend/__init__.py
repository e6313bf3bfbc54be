"""The backend "sidcomp": a process group that compresses what a program all-reduces."""
