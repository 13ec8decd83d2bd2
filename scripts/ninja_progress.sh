# To be sourced: shows Ninja's output, with NINJA_STATUS='[%f/%t] ', as one line that moves on a terminal, and elsewhere as
# a line for each tenth; what compilers say is shown in full. Uses SECONDS.

clear_line() {
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
}

# Of the step that ended last; a terminal's line moves every second.
done_steps=0
all_steps=1
show_progress() {
  local tenth=$((10 * done_steps / all_steps)) elapsed
  elapsed=$(printf '%d:%02d' $((SECONDS / 60)) $((SECONDS % 60)))
  if [[ -t 1 ]]; then
    printf '\r\033[Kbuilding %s: %d of %d steps, %s' "$folder" "$done_steps" "$all_steps" "$elapsed"
  elif [[ $tenth -gt $shown_tenth ]]; then
    echo "building $folder: $done_steps of $all_steps steps, $elapsed"
  fi
  shown_tenth=$tenth
}

# Ninja's lines "[done/all] ..." become progress; all others are for people.
take_line() {
  if [[ "$1" =~ ^\[([0-9]+)/([0-9]+)\]\  ]]; then
    done_steps=${BASH_REMATCH[1]} all_steps=${BASH_REMATCH[2]}
    show_progress
  elif [[ -n "$1" && "$1" != "ninja: "@(Entering|no work)* ]]; then
    clear_line
    printf '%s\n' "$1"
  fi
}

# follow_ninja FOLDER: reads what Ninja says of its build in that folder.
follow_ninja() {
  local folder=$1 part line="" shown_tenth=0
  while true; do
    if IFS= read -r -t 1 part; then
      take_line "$line$part"
      line=""
    elif [[ $? -gt 128 ]]; then  # nothing came in this second, or part of a line
      line+=$part
      show_progress
    else
      break
    fi
  done
  take_line "$line$part"
  clear_line
}
