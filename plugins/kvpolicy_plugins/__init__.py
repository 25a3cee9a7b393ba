"""Add-ons that combine with any policy, one file each."""

# In figures; names of kvpolicy.lab.looks.COLOURS. Other add-ons keep the colour of what they wrap.
COLOURS = {"mix": "wine"}
