"""Tests of the documents: links, blocks of code, citations, the tutorial, the site."""
