"""A reward or a loss of the user's, named by its import path.

functions     loads the function; errors name its file and line
modules       imports exactly the files that are its code, as they were read
files         which files these are: its own, and all that it imports from its folder tree
python_path   where Python finds a module: in folders, on its path, in an installed distribution
syntax        source code as keys see it: without comments and docstrings, and what it imports
"""
