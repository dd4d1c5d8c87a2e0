"""Recipes as their papers print them: formulas, programs and claims."""
