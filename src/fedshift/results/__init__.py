"""What runs gave: score rows, tables, plots and pages, all of them views of run folders."""
