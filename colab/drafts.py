# %% [markdown]
# # R
